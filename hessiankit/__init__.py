"""A toolkit for the exact curvature of transformers.

>>> import hessiankit as hk
>>> block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2)
>>> assert hk.check(block)
"""

from hessiankit.blocks import TransformerBlock, VisionTransformer
from hessiankit.curvature import Hessian, hessian
from hessiankit.errors import HessiankitError, InputError, OutOfMemoryError, TraceError
from hessiankit.operator import HessianOperator, hessian_operator
from hessiankit.optim import block_types
from hessiankit.trace import Trace, trace
from hessiankit.verify.check import CheckReport, CheckRow, check

__version__ = "0.1.0"

__all__ = [
    "CheckReport",
    "CheckRow",
    "Hessian",
    "HessianOperator",
    "HessiankitError",
    "InputError",
    "OutOfMemoryError",
    "Trace",
    "TraceError",
    "TransformerBlock",
    "VisionTransformer",
    "block_types",
    "check",
    "hessian",
    "hessian_operator",
    "trace",
]
