"""A toolkit for the exact curvature of transformers.

>>> import hessiankit as hk
>>> block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2)
>>> assert hk.check(block)
"""

import random
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hessiankit.support.package import __version__ as __version__
from hessiankit.support.package import on_demand

if TYPE_CHECKING:  # for type checkers; at run time ``_NAMES`` imports them
    from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
    from hessiankit.curvature.dense import Hessian, hessian
    from hessiankit.curvature.diagonal import hessian_diagonal
    from hessiankit.curvature.estimators import scalar_estimates
    from hessiankit.curvature.hessian_function import hessian_function
    from hessiankit.curvature.jacobian import JacobianOperator, jacobian_operator
    from hessiankit.curvature.operator import HessianOperator, hessian_operator
    from hessiankit.functions.attention import scaled_dot_product_attention
    from hessiankit.functions.cross_entropy import linear_cross_entropy
    from hessiankit.functions.twice_differentiable import twice_differentiable
    from hessiankit.landscape import loss_slices
    from hessiankit.request.function import from_function
    from hessiankit.support.errors import ConvergenceError, HessiankitError, InputError, OutOfMemoryError, TraceError
    from hessiankit.theory.bounding.bounds import bounds
    from hessiankit.theory.formulas.derive import derive
    from hessiankit.theory.identities import identical
    from hessiankit.tracing.trace import trace_module
    from hessiankit.training.by_partition.approximating import approximations
    from hessiankit.training.by_partition.landscape import critical_sharpness, frobenius_norms, spectrum
    from hessiankit.training.depth import depth_diagnostics, replace_norms
    from hessiankit.training.influence import RecordedRun, influence
    from hessiankit.training.monitoring import Monitor
    from hessiankit.training.optim import blockwise_lr, blockwise_schedule
    from hessiankit.training.partition import block_types, named_slices
    from hessiankit.training.sharpness import sharpness
    from hessiankit.verify.check import check
    from hessiankit.verify.check_jacobian import check_jacobian

_NAMES = {
    "blocks": "Transformer TransformerBlock VisionTransformer",
    "theory.bounding.bounds": "bounds",
    "curvature.dense": "Hessian hessian",
    "curvature.diagonal": "hessian_diagonal",
    "curvature.estimators": "scalar_estimates",
    "curvature.hessian_function": "hessian_function",
    "curvature.jacobian": "JacobianOperator jacobian_operator",
    "curvature.operator": "HessianOperator hessian_operator",
    "training.by_partition.approximating": "approximations",
    "training.by_partition.landscape": "critical_sharpness frobenius_norms spectrum",
    "training.depth": "depth_diagnostics replace_norms",
    "training.influence": "RecordedRun influence",
    "training.monitoring": "Monitor",
    "training.sharpness": "sharpness",
    "theory.formulas.derive": "derive",
    "theory.identities": "identical",
    "functions.attention": "scaled_dot_product_attention",
    "functions.cross_entropy": "linear_cross_entropy",
    "functions.twice_differentiable": "twice_differentiable",
    "landscape": "loss_slices",
    "training.optim": "blockwise_lr blockwise_schedule",
    "training.partition": "block_types named_slices",
    "support.errors": "ConvergenceError HessiankitError InputError OutOfMemoryError TraceError",
    "tracing.trace": "trace_module",
    "verify.check": "check",
    "verify.check_jacobian": "check_jacobian",
    "request.function": "from_function",
}
CALLS = {
    "hvp": "hessian_operator(...) @ v",
    "gnvp": "hessian_operator(..., kind='ggn') @ v",
    "ggn": "hessian_operator(..., kind='ggn')",
    "fisher": "hessian_operator(..., kind='fisher')",
    "kfac": "hessian_operator(...).approximation('kfac')",
    "trace": "scalar_estimates(hessian_operator(...)).trace, or hessian_diagonal(...).trace exactly",
    "hutchinson": "scalar_estimates(hessian_operator(...))",
    "eigenvalues": "spectrum(..., k=3)",
    "top_eigenvalues": "spectrum(..., k=3)",
    "lanczos": "spectrum(..., k=3, method='lanczos')",
}
"""What people call what is here -> the call."""
_HOME = {name: f"hessiankit.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "ConvergenceError", "Hessian", "HessianOperator", "HessiankitError", "InputError", "JacobianOperator", "Monitor",
    "OutOfMemoryError", "RecordedRun", "TraceError", "Transformer", "TransformerBlock", "VisionTransformer",
    "approximations", "block_types", "blockwise_lr", "blockwise_schedule", "bounds", "check", "check_jacobian",
    "critical_sharpness", "depth_diagnostics", "derive", "frobenius_norms", "from_function", "hessian", "hessian_diagonal",
    "hessian_function", "hessian_operator", "identical", "influence", "jacobian_operator", "linear_cross_entropy",
    "loss_slices", "named_slices", "replace_norms", "scalar_estimates", "scaled_dot_product_attention", "sharpness",
    "spectrum", "trace_module", "twice_differentiable",
]  # fmt: skip  # written out, since type checkers read it

if not TYPE_CHECKING:
    _public = on_demand(__name__, _NAMES)

    def __getattr__(name: str) -> Any:
        """Import what is asked for: ``import hessiankit`` alone imports neither torch nor sympy."""
        if name in _HOME:
            drawn = random.getstate()  # importing rich draws a number, and the user's random numbers are the user's
            try:
                return _public(name)
            finally:
                random.setstate(drawn)
        try:
            return import_module(f"hessiankit.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"hessiankit.{name}":
                raise
            from hessiankit.support.errors import did_you_mean

            hint = f"; it is {CALLS[name]}" if name in CALLS else did_you_mean(name, __all__)
            text = f"module 'hessiankit' has no attribute {name!r}{hint}"
            raise AttributeError(text, obj=sys.modules[__name__]) from None  # without name=, Python adds no suggestion of its own

    def __dir__() -> list[str]:
        """Name what is public, not what this file imports nor the submodules that were imported."""
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
