"""A toolkit for the exact curvature of transformers.

>>> import hessiankit as hk
>>> block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2)
>>> assert hk.check(block)
"""

from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
from hessiankit.bounding.report import BoundsReport, bounds
from hessiankit.curvature import Hessian, hessian
from hessiankit.derivation import Derivation, derive
from hessiankit.diagonal import CurvatureDiagonal, curvature_diagonal
from hessiankit.disk.forecast import Forecast
from hessiankit.errors import HessiankitError, InputError, OutOfMemoryError, TraceError
from hessiankit.frobenius import FrobeniusNorms, frobenius_norms
from hessiankit.fused import named_slices
from hessiankit.ledger import Ledger, LedgerReport, claims
from hessiankit.operator import HessianOperator, hessian_operator
from hessiankit.optim import block_types
from hessiankit.tracing.trace import Trace, trace
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport, CheckRow

__version__ = "0.1.0"

__all__ = [
    "BoundsReport",
    "CheckReport",
    "CheckRow",
    "CurvatureDiagonal",
    "Derivation",
    "Forecast",
    "FrobeniusNorms",
    "Hessian",
    "HessianOperator",
    "HessiankitError",
    "InputError",
    "Ledger",
    "LedgerReport",
    "OutOfMemoryError",
    "Trace",
    "TraceError",
    "Transformer",
    "TransformerBlock",
    "VisionTransformer",
    "block_types",
    "bounds",
    "check",
    "claims",
    "curvature_diagonal",
    "derive",
    "frobenius_norms",
    "hessian",
    "hessian_operator",
    "named_slices",
    "trace",
]
