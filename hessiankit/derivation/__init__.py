"""Closed forms of a block's derivatives, to be read: ``hessiankit.derivation``."""

from hessiankit.derivation.derive import derive
from hessiankit.derivation.result import Derivation

__all__ = ["Derivation", "derive"]
