"""The pictures of the pages on vec_r: rows stacked, a Kronecker product, a Jacobian, a second derivative, a block of a Hessian.

Drawn for docs/concepts. The matrices are those of a linear network of two layers, F = X W_1 W_2, with L = 3 tokens, d = 2, h = 3
and two outputs, and of the same with a tanh between the layers; squared error, float64, fixed seeds. The formulas are evaluated
here with ``torch.kron`` and a permutation, and set beside what :func:`hessiankit.hessian` returns: the titles say how far they
agree, the CSV has every entry of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import hessiankit as hk
from derivations.matrix import Commutation
from hessiankit.curvature.plot_frame import write_numbers

NAME = Path(__file__).stem
ROWS = ("#0072B2", "#E69F00", "#009E73")  # Okabe and Ito's blue, orange and green: a colour a row of the matrix
MAP = "RdBu_r"
TOKENS, WIDTH, HIDDEN, OUT = 3, 2, 3, 2


class Layers(nn.Module):
    """F = phi(X W_1) W_2, with phi the identity or tanh."""

    def __init__(self, *, bent: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W_1 = nn.Parameter(torch.randn(WIDTH, HIDDEN, generator=generator, dtype=torch.float64))
        self.W_2 = nn.Parameter(torch.randn(HIDDEN, OUT, generator=generator, dtype=torch.float64))
        self.bent = bent

    def forward(self, X: Tensor) -> Tensor:
        """Return the outputs, L x 2."""
        U = X @ self.W_1
        return (torch.tanh(U) if self.bent else U) @ self.W_2


def data() -> tuple[Tensor, Tensor]:
    """Return tokens, 3 x 2, and targets, 3 x 2."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return X, torch.randn(TOKENS, OUT, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Block:
    """The block of W_1 and W_2 of the linear network: its two terms by the formula, and the Hessian that it is a block of."""

    gauss_newton: Tensor
    functional: Tensor
    whole: Tensor

    @property
    def formula(self) -> Tensor:
        """The block, 6 x 6."""
        return self.gauss_newton + self.functional

    @property
    def computed(self) -> Tensor:
        """The same block of the Hessian."""
        return self.whole[: WIDTH * HIDDEN, WIDTH * HIDDEN :]

    @property
    def difference(self) -> float:
        """Largest difference of the two, relative to the largest entry."""
        return float((self.formula - self.computed).abs().max() / self.computed.abs().max())


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def _kron(A: Tensor, B: Tensor) -> Tensor:
    return torch.kron(A.contiguous(), B.contiguous())  # which refuses some transposed matrices


def block() -> Block:
    """Return 2/N [X^T X W_1 (x) W_2 + (X^T R (x) I_h) K_{out,h}] in its two terms, with R = F - T and N entries of F."""
    model, (X, T) = Layers(bent=False), data()
    W_1, W_2 = model.W_1.detach(), model.W_2.detach()
    R, scale = X @ W_1 @ W_2 - T, 2 / T.numel()
    functional = _kron(X.T @ R, _eye(HIDDEN)) @ Commutation(OUT, HIDDEN).dense().double()
    whole = hk.hessian(model, X, T, loss="mse").matrix
    return Block(scale * _kron(X.T @ X @ W_1, W_2), scale * functional, whole)


def sites() -> dict[str, Tensor]:
    """Return what each bent operation of tanh(X W_1) W_2 adds to the Hessian: J^T [lambda . D^2 phi] J, 12 x 12 each."""
    model, (X, T) = Layers(bent=True), data()
    W_1, W_2 = model.W_1.detach(), model.W_2.detach()
    A = torch.tanh(X @ W_1)
    R, scale, n = A @ W_2 - T, 2 / T.numel(), W_2.numel()
    slope, bend = 1 - A**2, -2 * A * (1 - A**2)
    J_U = torch.cat([_kron(X, _eye(HIDDEN)), torch.zeros(A.numel(), n).double()], dim=1)
    J_A = slope.reshape(-1, 1) * J_U
    J_W = torch.cat([torch.zeros(n, n).double(), _eye(n)], dim=1)  # of W_2 itself
    J_F = _kron(_eye(TOKENS), W_2.T) @ J_A + _kron(A, _eye(OUT)) @ J_W
    cross = J_A.T @ (_kron(scale * R, _eye(HIDDEN)) @ Commutation(OUT, HIDDEN).dense().double()) @ J_W
    at_tanh = (scale * R @ W_2.T * bend).reshape(-1)
    return {"loss": scale * J_F.T @ J_F, "product": cross + cross.T, "tanh": J_U.T @ (at_tanh[:, None] * J_U)}


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw six pictures and write the block's entries; ``quick`` changes nothing: it takes seconds."""
    out.mkdir(parents=True, exist_ok=True)
    found, terms = block(), sites()
    whole = hk.hessian(Layers(bent=True), *data(), loss="mse").matrix
    pictures = {
        "stacking": _stacking(), "kronecker": _kronecker(), "jacobian": _jacobian(), "second": _second(),
        "block": _block(found), "sum": _sum(terms, whole),
    }  # fmt: skip
    paths = []
    for name, figure in pictures.items():
        paths.append(out / f"{NAME}_{name}{suffix}")
        figure.savefig(paths[-1], dpi=130, bbox_inches="tight", metadata={"Software": None} if suffix == ".png" else None)
        plt.close(figure)
    entries = [
        (i, j, float(found.computed[i, j]), float(found.gauss_newton[i, j]), float(found.functional[i, j]))
        for i in range(WIDTH * HIDDEN)
        for j in range(HIDDEN * OUT)
    ]
    paths.append(out / f"{NAME}.csv")
    write_numbers(paths[-1], ("row", "column", "hessian", "gauss_newton", "functional"), entries)
    return paths


def _cells(axes: Axes, texts: list[list[str]], colours: list[list[str]], x: float = 0, y: float = 0) -> None:
    """Draw a matrix of coloured cells with texts, its upper left corner at (x, y); y runs downwards."""
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            axes.add_patch(Rectangle((x + j, y + i), 1, 1, facecolor=colours[i][j], alpha=0.45, edgecolor="black", linewidth=0.8))
            axes.text(x + j + 0.5, y + i + 0.5, text, ha="center", va="center", fontsize=11)


def _canvas(width: float, height: float, scale: float = 0.42) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width * scale, height * scale))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return figure, axes


def _label(axes: Axes, x: float, y: float, text: str, size: float = 13) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=size)


def _letters(letter: str, rows: int, columns: int) -> list[list[str]]:
    return [[f"${letter}_{{{i}{j}}}$" for j in range(1, columns + 1)] for i in range(1, rows + 1)]


def _stacking() -> Figure:
    figure, axes = _canvas(17, 8.4)
    texts, colours = _letters("x", 3, 2), [[ROWS[i]] * 2 for i in range(3)]
    _label(axes, 1.5, 1.6, "$X$")
    _cells(axes, texts, colours, 0.5, 2.5)
    flat = [(texts[i][j], ROWS[i]) for i in range(3) for j in range(2)]
    by_column = [(texts[i][j], ROWS[i]) for j in range(2) for i in range(3)]
    for x, name, entries in ((6, r"$\mathrm{vec}_r(X)$: rows", flat), (11, r"$\mathrm{vec}(X)$: columns", by_column)):
        _label(axes, x + 0.5, 0.9, name, 12)
        _cells(axes, [[t] for t, _ in entries], [[c] for _, c in entries], x, 1.7)
    axes.annotate("", (5.5, 4), (3.1, 4), arrowprops={"arrowstyle": "->"})
    _label(axes, 14.8, 4.6, "X.reshape(-1)\nreads memory\nas it lies: $\\mathrm{vec}_r$", 10)
    return figure


def _kronecker() -> Figure:
    figure, axes = _canvas(23, 7.4)
    a, b = _letters("a", 2, 3), _letters("b", 2, 2)
    colours = [["#CC79A7", "#56B4E9"], ["#F0E442", "#D55E00"]]
    _label(axes, 2, 1.3, "$A$")
    _cells(axes, a, [["#ffffff"] * 3] * 2, 0.5, 2.7)
    _label(axes, 4.2, 3.7, r"$\otimes$", 16)
    _label(axes, 6, 1.3, "$B$")
    _cells(axes, b, colours, 5, 2.7)
    _label(axes, 8, 3.7, "$=$", 16)
    for i in range(2):
        for j in range(3):
            x, y = 9 + 4.6 * j, 1.3 + 2.3 * i
            for k in range(2):
                for m in range(2):
                    colour = (("#CC79A7", "#56B4E9"), ("#F0E442", "#D55E00"))[k][m]
                    axes.add_patch(
                        Rectangle((x + 2.1 * m, y + k), 2.1, 1, facecolor=colour, alpha=0.45, edgecolor="black", lw=0.8)
                    )
                    axes.text(
                        x + 2.1 * m + 1.05, y + k + 0.5, f"$a_{{{i + 1}{j + 1}}}b_{{{k + 1}{m + 1}}}$", ha="center", va="center"
                    )
    _label(axes, 15.9, 6.8, r"$\mathrm{vec}_r(A\,X\,B) = (A\otimes B^\top)\,\mathrm{vec}_r(X)$", 13)
    return figure


def _numbers(axes: Axes, matrix: Tensor, rows: list[str], columns: list[str], title: str, largest: float | None = None) -> None:
    """Draw a matrix of numbers by colour, zero white, with names of its rows and columns."""
    top = float(matrix.abs().max()) if largest is None else largest
    axes.imshow(matrix.numpy(), cmap=MAP, norm=Normalize(-top, top))
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.set_title(title, fontsize=11, pad=8)


def _names(letter: str, rows: int, columns: int) -> list[str]:
    return [text for row in _letters(letter, rows, columns) for text in row]


def _jacobian() -> Figure:
    X, _ = data()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.9), width_ratios=(1, 1.55), layout="constrained")
    top = float(X.abs().max())
    _numbers(left, X, ["token 1", "token 2", "token 3"], ["1", "2"], "$X$", top)
    jacobian = _kron(X, _eye(HIDDEN))
    title = r"$\partial\,\mathrm{vec}_r(F)/\partial\,\mathrm{vec}_r(W)^\top = X\otimes I_3$ for $F = X\,W$"
    _numbers(right, jacobian, _names("F", TOKENS, HIDDEN), _names("W", WIDTH, HIDDEN), title, top)
    for i in range(TOKENS):
        for j in range(WIDTH):
            right.add_patch(Rectangle((3 * j - 0.5, 3 * i - 0.5), 3, 3, fill=False, edgecolor="black", linewidth=1.6))
    return figure


def _second() -> Figure:
    figure, axes = _canvas(24, 10.4)
    _label(axes, 5.6, 0.7, r"$\partial^2 F/\partial W_i\,\partial W_j$", 12)
    for k, colour in enumerate(ROWS):
        axes.add_patch(Rectangle((2.6, 1.5 + 2.6 * k), 6, 2.6, facecolor=colour, alpha=0.45, edgecolor="black"))
        _label(axes, 5.6, 2.8 + 2.6 * k, f"second derivatives\nof entry {k + 1} of $\\mathrm{{vec}}_r(F)$", 9.5)
        _label(axes, 1.5, 2.8 + 2.6 * k, "$n_i$ rows", 9.5)
    _label(axes, 5.6, 9.8, "$n_j$ columns", 9.5)
    axes.annotate("", (15.2, 5.4), (9.2, 5.4), arrowprops={"arrowstyle": "->"})
    _label(axes, 12.2, 4.6, r"$(\lambda^\top\otimes I_{n_i})\;\cdot$", 13)
    _label(axes, 12.2, 6.4, "entry by entry times\n$\\lambda$, and added up", 9.5)
    axes.add_patch(Rectangle((15.8, 4.1), 6, 2.6, facecolor="0.85", edgecolor="black"))
    _label(axes, 18.8, 5.4, r"$\sum_k\lambda_k\,\partial^2 F_k/\partial W_i\,\partial W_j$", 10)
    _label(axes, 18.8, 3.4, "part of a block of the loss's Hessian", 9.5)
    _label(axes, 18.8, 7.4, "$n_i\\times n_j$", 9.5)
    return figure


def _block(found: Block) -> Figure:
    figure, grid = plt.subplots(2, 2, figsize=(8.6, 8.8), layout="constrained")
    panels = grid.ravel()
    names = [_names(r"W^{(1)}", WIDTH, HIDDEN), _names(r"W^{(2)}", HIDDEN, OUT)]
    both = ["$W_1$" if k == 2 else "$W_2$" if k == 8 else "" for k in range(12)]
    _numbers(panels[0], found.whole, both, both, "the Hessian, 12 x 12")
    panels[0].add_patch(Rectangle((5.5, -0.5), 6, 6, fill=False, edgecolor="black", linewidth=2.5))
    top = float(found.computed.abs().max())
    gap = "equal to rounding" if found.difference < 1e-14 else f"largest difference {found.difference:.0e}"
    parts = (
        (found.computed, f"its block of $W_1$ and $W_2$\n(formula: {gap})"),
        (found.gauss_newton, "$\\frac{2}{N}\\;X^\\top X\\,W_1\\otimes W_2$\n"),
        (found.functional, "$\\frac{2}{N}\\;(X^\\top R\\otimes I_3)\\,K_{2,3}$\n"),
    )
    for axes, (matrix, title) in zip(panels[1:], parts, strict=True):
        _numbers(axes, matrix, names[0], names[1], title, top)
        axes.tick_params(labelsize=7.5)
    return figure


def _sum(terms: dict[str, Tensor], whole: Tensor) -> Figure:
    figure, panels = plt.subplots(1, 4, figsize=(11.4, 3.3), layout="constrained")
    both = ["$W_1$" if k == 2 else "$W_2$" if k == 8 else "" for k in range(12)]
    gap = float((sum(terms.values()) - whole).abs().max() / whole.abs().max())
    titles = {"loss": "squared error", "product": r"+ product $A\,W_2$", "tanh": "+ tanh"}
    top = float(torch.stack([whole, *terms.values()]).abs().max())
    for axes, (name, matrix) in zip(panels, [*terms.items(), ("whole", whole)], strict=True):
        equal = "equal to rounding" if gap < 1e-14 else f"largest difference {gap:.0e}"
        _numbers(axes, matrix, both, both, titles.get(name, f"= the Hessian ({equal})"), top)
        for line in (axes.axhline, axes.axvline):
            line(5.5, color="black", linewidth=1)
    return figure
