"""Entrywise activations as a primitive; their derivatives are those of ``derivations.activation_functions``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from derivations.activation_functions import KINDS, Derivatives, derivatives
from hessiankit.primitives.primitive import Entrywise


@dataclass(frozen=True)
class Activation(Entrywise):
    """An entrywise activation as a primitive, for tensors of any shape; inputs (X,).

    Args:
        kind: one of ``KINDS``.
        negative_slope: the slope of leaky_relu left of 0.

    >>> import torch
    >>> X = torch.tensor([-1.0, 2.0])
    >>> Activation("leaky_relu", 0.5).vjp((X,), torch.ones(1, 2))[0].tolist()
    [[0.5, 1.0]]
    """

    kind: str
    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Activation: there is no kind {self.kind!r}; the kinds are {', '.join(KINDS)}")
        object.__setattr__(self, "is_linear", self.kind == "identity")

    def derivatives(self, x: Tensor) -> Derivatives:
        return derivatives(self.kind, x, self.negative_slope)
