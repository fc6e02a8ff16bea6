"""Closed forms of a block's derivatives, to be read: ``hessiankit.derivation``."""

from hessiankit.derivation.derive import Derivation, derive

__all__ = ["Derivation", "derive"]
