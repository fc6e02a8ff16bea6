"""The letters of Theorem 3 as tensors, and two ways to compare their printed derivatives with autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from derivations.layernorm_theorems import LayerNormTheorems
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.layernorm import EQUAL, GENERIC, centred, inverse_scales, scales, tokens
from hessiankit.ledger.curvature_gap.notation import basis_pairs, dense, eye, if_it_conforms, kron, ones
from hessiankit.ledger.evidence import agrees, wrong

AUTOGRAD = "against autograd"


class Pieces:
    """Theorem 3's letters at X as tensors, each a function of X as C.3 defines it, for autograd to differentiate."""

    def __init__(self, X: Tensor) -> None:
        self.X, (self.L, self.d) = X, X.shape
        self.n = self.L * self.d
        self.closed = LayerNormTheorems(X)

    def reference(self, letter: str) -> Tensor:
        """Return d(letter)/dX by autograd."""
        return jacobian_of(getattr(self, letter), self.X)

    def P(self, X: Tensor) -> Tensor:
        """diag^{-1}(sigma)."""
        return inverse_scales(X)

    def D(self, X: Tensor) -> Tensor:
        """diag(sigma)."""
        return torch.diag(scales(X)[:, 0])

    def dP(self, X: Tensor) -> Tensor:
        """A_1 B_1 / sqrt(d), which is dP/dX (Theorem 8)."""
        return self.A1(X) @ self.B1(X) / self.d**0.5

    def A1(self, X: Tensor) -> Tensor:
        """-D^{-1} (x) D^{-T}."""
        return -kron(self.P(X), self.P(X).T)

    def B1(self, X: Tensor) -> Tensor:
        """E A_2 B_2."""
        return basis_pairs(self.L) @ self.A2(X) @ self.B2(X)

    def A2(self, X: Tensor) -> Tensor:
        """diag^{-1}(vec_r^{1/2}(M^{o2} 1))."""
        return torch.diag(1 / centred(X).norm(dim=1))

    def B2(self, X: Tensor) -> Tensor:
        """J A_3 B_3."""
        return kron(eye(self.L), ones(1, self.d)) @ self.A3(X) @ self.dM

    def A3(self, X: Tensor) -> Tensor:
        """diag(vec_r M)."""
        return torch.diag(centred(X).reshape(-1))

    @property
    def dM(self) -> Tensor:
        """B_3 = dM/dX, a constant."""
        return kron(eye(self.L), eye(self.d) - ones(self.d, self.d) / self.d)


def holds(seed: int, printed: Callable[[Pieces], Tensor], letter: str, *, closed: str = "") -> Evidence:
    """Compare a printed derivative, and the closed form where there is one, with autograd at both sizes."""
    found, references = [], []
    for shape in (GENERIC, EQUAL):
        at = Pieces(tokens(seed, shape))
        reference = at.reference(letter)
        found.append(printed(at))
        references.append(reference)
        if closed:
            found.append(dense(getattr(at.closed, closed)))
            references.append(reference)
    return agrees(found, references, f"{AUTOGRAD}, L = d_V and not")


def misprint(
    seed: int, printed: Callable[[Pieces], Tensor], closed: Callable[[Pieces], Tensor], reference: Callable[[Pieces], Tensor]
) -> Evidence:
    """Show that a printed derivative is off at both sizes, and the corrected one is not."""
    pieces = [Pieces(tokens(seed, shape)) for shape in (GENERIC, EQUAL)]
    as_printed, references = [if_it_conforms(printed, at) for at in pieces], [reference(at) for at in pieces]
    detail = "the smaller of the errors at (L, d_V) = (3, 4) and (3, 3)"
    return wrong(as_printed, references, detail, corrected=[closed(at) for at in pieces])
