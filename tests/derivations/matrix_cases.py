"""Every node of a matrix expression beside the matrix that loops and torch.kron write out for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import sympy
import torch
from torch import Tensor

from derivations.arrays import Array
from derivations.matrix import (
    BlockDiagonal,
    Commutation,
    Dense,
    Diagonal,
    DiagonalLift,
    DiagonalTake,
    Identity,
    Matrix,
    Ones,
    SliceTranspose,
    Vec,
    VecIdentity,
    Zero,
    kron,
)
from derivations.row_blocks import Centring, RowBlocks
from derivations.selection import Selection

F64 = torch.float64


def integers(name: str, m: int, n: int) -> list[list[int]]:
    """A matrix of small integers that depends on its name alone: float64 and exact results must then be equal."""
    draw = random.Random(f"{name} {m} {n}")
    return [[draw.choice([-3, -2, -1, 1, 2, 3]) for _ in range(n)] for _ in range(m)]


def rational(x: Tensor) -> sympy.Matrix:
    return sympy.Matrix(*x.shape, [sympy.Rational(Fraction(v)) for v in x.reshape(-1).tolist()])


def tensor(name: str, m: int, n: int) -> Tensor:
    return torch.tensor(integers(name, m, n), dtype=F64).reshape(m, n)


def exact(name: str, m: int, n: int) -> Array:
    return np.array(integers(name, m, n), dtype=object).reshape(m, n)


Leaf = Callable[[str, int, int], Array]


@dataclass(frozen=True)
class Case:
    """A node over leaves of any arithmetic, the matrix it stands for, its LaTeX, and whether its norm bound is exact."""

    build: Callable[[Leaf], Matrix]
    reference: Callable[[], Tensor]
    latex: str
    sharp: bool = True


def commutation(m: int, n: int) -> Tensor:
    """K with K vec(A) = vec(A^T): entry A_ij stands at jm + i in vec(A) and at in + j in vec(A^T)."""
    K = torch.zeros(m * n, m * n, dtype=F64)
    for i in range(m):
        for j in range(n):
            K[i * n + j, j * m + i] = 1
    return K


def lift(n: int) -> Tensor:
    E = torch.zeros(n * n, n, dtype=F64)
    for i in range(n):
        basis = torch.zeros(n, dtype=F64)
        basis[i] = 1
        E[:, i] = torch.kron(basis, basis)
    return E


def sliced(H: Tensor, k: int) -> Tensor:
    return torch.cat([part.T for part in H.chunk(k)])


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=F64)


A, B, C = tensor("A", 3, 2), tensor("B", 4, 5), tensor("C", 3, 2)

CASES = {
    "dense": Case(lambda leaf: Dense(leaf("A", 3, 2), "A"), lambda: A, "A"),
    "identity": Case(lambda leaf: Identity(4), lambda: eye(4), "I_{4}"),
    "ones": Case(lambda leaf: Ones(3, 4), lambda: torch.ones(3, 4, dtype=F64), r"\mathbf{1}_{3\times 4}"),
    "ones column": Case(lambda leaf: Ones(3), lambda: torch.ones(3, 1, dtype=F64), r"\mathbf{1}_{3}"),
    "ones row": Case(lambda leaf: Ones(1, 3), lambda: torch.ones(1, 3, dtype=F64), r"\mathbf{1}_{3}^\top"),
    "zero": Case(lambda leaf: Zero(2, 5), lambda: torch.zeros(2, 5, dtype=F64), r"0_{2\times 5}"),
    "diagonal": Case(
        lambda leaf: Diagonal(leaf("v", 4, 1), "v"), lambda: torch.diag(tensor("v", 4, 1).reshape(-1)), r"\operatorname{diag}(v)"
    ),
    "block diagonal": Case(
        lambda leaf: BlockDiagonal([Dense(leaf("A", 3, 2), "A"), Identity(2), Dense(leaf("B", 4, 5), "B")]),
        lambda: torch.block_diag(A, eye(2), B),
        r"\operatorname{blockdiag}\left(A,\,I_{2},\,B\right)",
    ),
    "block diagonal with a name": Case(
        lambda leaf: BlockDiagonal([Dense(leaf("A", 3, 2)), Dense(leaf("B", 4, 5))], "A_i"),
        lambda: torch.block_diag(A, B),
        r"\operatorname{blockdiag}\left(A_i\right)",
    ),
    "lift": Case(lambda leaf: DiagonalLift(3), lambda: lift(3), "E_{3}"),
    "take": Case(lambda leaf: DiagonalTake(3), lambda: lift(3).T, r"E_{3}^\top"),
    "commutation": Case(lambda leaf: Commutation(2, 3), lambda: commutation(2, 3), "K_{2,3}"),
    "vec of the identity": Case(lambda leaf: VecIdentity(3), lambda: eye(3).reshape(-1, 1), r"\operatorname{vec}_r(I_{3})"),
    "vec": Case(lambda leaf: Vec(Dense(leaf("A", 3, 2), "A")), lambda: A.reshape(-1, 1), r"\operatorname{vec}_r(A)"),
    "vec of structure": Case(
        lambda leaf: Vec(Commutation(2, 3)), lambda: commutation(2, 3).reshape(-1, 1), r"\operatorname{vec}_r(K_{2,3})"
    ),
    "slice transpose": Case(
        lambda leaf: SliceTranspose(Dense(leaf("H", 12, 2), "H"), 4),
        lambda: sliced(tensor("H", 12, 2), 4),
        r"\mathcal{T}_{4}[H]",
        sharp=False,
    ),
    "kronecker": Case(
        lambda leaf: kron(Dense(leaf("A", 3, 2), "A"), Dense(leaf("B", 4, 5), "B")), lambda: torch.kron(A, B), r"A\otimes B"
    ),
    "kronecker, growing": Case(
        lambda leaf: kron(Dense(leaf("A", 3, 2), "A"), Dense(leaf("G", 5, 2), "G")),
        lambda: torch.kron(A, tensor("G", 5, 2)),
        r"A\otimes G",
    ),
    "kronecker, shrinking": Case(
        lambda leaf: kron(Dense(leaf("S", 2, 5), "S"), Dense(leaf("T", 1, 4), "T")),
        lambda: torch.kron(tensor("S", 2, 5), tensor("T", 1, 4)),
        r"S\otimes T",
    ),
    "identity on the left": Case(
        lambda leaf: kron(Identity(3), Dense(leaf("B", 4, 5), "B")), lambda: torch.kron(eye(3), B), r"I_{3}\otimes B"
    ),
    "identity on the right": Case(
        lambda leaf: kron(Dense(leaf("B", 4, 5), "B"), Identity(3)), lambda: torch.kron(B, eye(3)), r"B\otimes I_{3}"
    ),
    "three factors": Case(
        lambda leaf: kron(Identity(2), Commutation(3, 2), Dense(leaf("A", 3, 2), "A")),
        lambda: torch.kron(torch.kron(eye(2), commutation(3, 2)), A),
        r"I_{2}\otimes K_{3,2}\otimes A",
    ),
    "product": Case(
        lambda leaf: Dense(leaf("A", 3, 2), "A") @ Dense(leaf("D", 2, 6), "D") @ Commutation(3, 2),
        lambda: A @ tensor("D", 2, 6) @ commutation(3, 2),
        r"A\,D\,K_{3,2}",
        sharp=False,
    ),
    "sum": Case(
        lambda leaf: Dense(leaf("A", 3, 2), "A") + Ones(3, 2) - Dense(leaf("C", 3, 2), "C"),
        lambda: A + 1 - C,
        r"A+\mathbf{1}_{3\times 2}-C",
        sharp=False,
    ),
    "scaled": Case(lambda leaf: Fraction(-1, 2) * Dense(leaf("A", 3, 2), "A"), lambda: -A / 2, r"-\frac{1}{2}\,A"),
    "negative of a sum": Case(
        lambda leaf: -(Dense(leaf("A", 3, 2), "A") + Dense(leaf("C", 3, 2), "C")),
        lambda: -A - C,
        r"-\left(A+C\right)",
        sharp=False,
    ),
    "selection": Case(
        lambda leaf: Selection([3, 0, 3, 1, 3], 5),
        lambda: torch.nn.functional.one_hot(torch.tensor([3, 0, 3, 1, 3]), 5).double(),
        "P",
    ),
    "row blocks": Case(
        lambda leaf: RowBlocks(leaf("A", 3, 2)),
        lambda: torch.block_diag(*[row.reshape(-1, 1) for row in A]),
        r"\operatorname{blockdiag}_i(a_i)",
    ),
    "centring": Case(lambda leaf: Centring(4), lambda: eye(4) - 0.25, "C_{4}"),
    "all together": Case(
        lambda leaf: (kron(Dense(leaf("A", 3, 2), "A"), Identity(2)) + 2 * Ones(6, 4)) @ kron(VecIdentity(2), Identity(1)),
        lambda: (torch.kron(A, eye(2)) + 2) @ eye(2).reshape(-1, 1),
        r"\left(A\otimes I_{2}+2\,\mathbf{1}_{6\times 4}\right)\,\operatorname{vec}_r(I_{2})",
        sharp=False,
    ),
}
