"""Closed forms of a block's derivatives, to be read: ``hessiankit.formulas``."""

from hessiankit.formulas.derive import derive
from hessiankit.formulas.result import Derivation

__all__ = ["Derivation", "derive"]
