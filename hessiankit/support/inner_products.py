"""Inner products and random entries of vectors, also of vectors that several processes hold, as copies or in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Vectors:
    """Vectors held by one process; subclasses are held by several."""

    def sum(self, terms: Tensor) -> Tensor:
        """Return sums over the entries here as sums over all entries."""
        return terms

    def drawn(self, draw: Callable[[int], Tensor], size: int) -> Tensor:
        """Return the ``size`` entries here of a vector, where ``draw(n)`` draws the next n entries."""
        return draw(size)

    def qr(self, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q (P, k) with orthonormal columns and the upper triangular R (k, k) with Q R = Y."""
        Q, R = torch.linalg.qr(Y)
        return Q, R


_VECTORS: ContextVar[Vectors] = ContextVar("_VECTORS", default=Vectors())  # noqa: B039, which has no state


@contextmanager
def held_as(vectors: Vectors) -> Iterator[None]:
    """Let vectors be held in another way within the context."""
    token = _VECTORS.set(vectors)
    try:
        yield
    finally:
        _VECTORS.reset(token)


def holding() -> Vectors:
    """Return the current way of holding vectors."""
    return _VECTORS.get()


def summed(terms: Tensor) -> Tensor:
    """Return sums over the entries that are here as sums over all entries of vectors."""
    return holding().sum(terms)


def inner(u: Tensor, v: Tensor) -> float:
    """Return <u, v>, summed in float64 where the device has it."""
    return float(summed((u * v).sum(dtype=u.dtype if u.device.type == "mps" else torch.float64)))


def norm(v: Tensor) -> float:
    """Return |v|."""
    return math.sqrt(inner(v, v))


def entries(v: Tensor) -> int:
    """Return the number of entries of a vector."""
    return int(summed(torch.tensor(v.numel(), device=v.device)))


def normal(size: int, seed: int) -> Tensor:
    """Return the ``size`` entries that are here of a vector of standard normal numbers, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return holding().drawn(lambda n: torch.randn(n, generator=generator, dtype=torch.float64, device="cpu"), size)
