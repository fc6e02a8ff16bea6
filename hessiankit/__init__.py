"""A toolkit for the exact curvature of transformers.

>>> import hessiankit as hk
>>> block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2)
>>> assert hk.check(block)
"""

import random
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
    from hessiankit.bounding.report import BoundsReport, bounds
    from hessiankit.curvature import Hessian, hessian
    from hessiankit.depth import DepthReport, depth_diagnostics
    from hessiankit.derivation import Derivation, derive
    from hessiankit.diagonal import CurvatureDiagonal, curvature_diagonal, hessian_diagonal
    from hessiankit.disk.forecast import Forecast
    from hessiankit.errors import HessiankitError, InputError, OutOfMemoryError, TraceError
    from hessiankit.estimation import SharpnessReport, exact_sharpness, sharpness
    from hessiankit.estimators import Estimate, ScalarEstimates, scalar_estimates
    from hessiankit.frobenius import FrobeniusNorms, frobenius_norms
    from hessiankit.fused import named_slices
    from hessiankit.ledger import Ledger, LedgerReport, claims
    from hessiankit.monitoring import Monitor, plot_monitor, read_monitor
    from hessiankit.operator import HessianOperator, hessian_operator
    from hessiankit.optim import blockwise_lr, blockwise_schedule
    from hessiankit.parts import BlockTypes, block_types
    from hessiankit.tracing.trace import Trace, trace
    from hessiankit.verify.check import check
    from hessiankit.verify.check_report import CheckReport, CheckRow

__version__ = "0.1.0"

_HOMES = {
    "blocks": ("Transformer", "TransformerBlock", "VisionTransformer"),
    "bounding.report": ("BoundsReport", "bounds"),
    "curvature": ("Hessian", "hessian"),
    "depth": ("DepthReport", "depth_diagnostics"),
    "derivation": ("Derivation", "derive"),
    "diagonal": ("CurvatureDiagonal", "curvature_diagonal", "hessian_diagonal"),
    "disk.forecast": ("Forecast",),
    "errors": ("HessiankitError", "InputError", "OutOfMemoryError", "TraceError"),
    "estimation": ("SharpnessReport", "exact_sharpness", "sharpness"),
    "estimators": ("Estimate", "ScalarEstimates", "scalar_estimates"),
    "frobenius": ("FrobeniusNorms", "frobenius_norms"),
    "fused": ("named_slices",),
    "ledger": ("Ledger", "LedgerReport", "claims"),
    "monitoring": ("Monitor", "plot_monitor", "read_monitor"),
    "operator": ("HessianOperator", "hessian_operator"),
    "optim": ("blockwise_lr", "blockwise_schedule"),
    "parts": ("BlockTypes", "block_types"),
    "tracing.trace": ("Trace", "trace"),
    "verify.check": ("check",),
    "verify.check_report": ("CheckReport", "CheckRow"),
}
_HOME = {name: f"hessiankit.{module}" for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # a type checker reads the imports above

    def __getattr__(name: str) -> Any:
        """Import what is asked for: ``import hessiankit`` alone imports neither torch nor sympy."""
        if name in _HOME:
            drawn = random.getstate()  # importing rich draws a number, and the user's random numbers are the user's
            try:
                value = getattr(import_module(_HOME[name]), name)
            finally:
                random.setstate(drawn)
            globals()[name] = value
            return value
        try:
            return import_module(f"hessiankit.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"hessiankit.{name}":
                raise
            from hessiankit.errors import did_you_mean

            told = f"module 'hessiankit' has no attribute {name!r}{did_you_mean(name, __all__)}"
            raise AttributeError(told, obj=sys.modules[__name__]) from None  # without name=, Python adds no suggestion of its own

    def __dir__() -> list[str]:
        """Name what is public, not what this file imports nor the submodules that were imported."""
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
