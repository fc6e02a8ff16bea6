"""Closed forms of a block's derivatives as formulas: ``derive`` and its result."""

from hessiankit.formulas.derive import derive
from hessiankit.formulas.result import Derivation

__all__ = ["Derivation", "derive"]
