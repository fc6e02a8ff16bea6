"""What jets and exact arrays ask of a number that is neither an ``int`` nor a ``Fraction``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ExactNumber(ABC):
    """A number with ``+ - * /`` that also meets ``int`` and ``Fraction``, and with roots of its own.

    ``derivations.arrays.sqrt`` takes the roots of such numbers by their method ``sqrt``.
    """

    __slots__ = ()

    @abstractmethod
    def __neg__(self) -> Any:
        """Return -self."""

    @abstractmethod
    def reciprocal(self) -> Any:
        """Return 1 / self."""

    @abstractmethod
    def sqrt(self) -> Any:
        """Return the square root."""
