"""``derive``: a block's Jacobian or Hessian block as an expression in vec_r that can be read, computed and bounded."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from derivations.arrays import Array
from derivations.composition import gauss_newton
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix, Named, definitions, dimensions
from derivations.operation import shape_of
from derivations.stage import Stage
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.checks import unknown
from hessiankit.blocks.norms import GroupNorm
from hessiankit.derivation.dimensions import SizeNames, Sizes, sizes_for
from hessiankit.derivation.parts import Parts, block_stage, input_stage
from hessiankit.derivation.plain import plain
from hessiankit.derivation.symbols import index_of
from hessiankit.errors import InputError

ALIASES = {
    "query": "attention.W_Q",
    "key": "attention.W_K",
    "value": "attention.W_V",
    "output": "attention.W_O",
    "up": "feedforward.W_1",
    "down": "feedforward.W_2",
    "gate": "feedforward.W_G",
    "input": "X",
}
"""What the parameters are called in words; their dotted names and the paper's letters (Q, W_Q, 1, ...) work too."""


@dataclass(frozen=True, eq=False)
class Derivation:
    r"""A derivative of a block's output, or of its loss, with respect to one or two of its parameters.

    ``matrix`` is the expression at the point; its rows and columns are in the order of vec_r, which for the parameters of
    ``hessiankit`` is that of ``reshape(-1)``. One parameter: the Jacobian dZ/dW_i of shape (L d) x n_i. Two: the second
    derivative, (L d n_i) x n_j, or for a loss the n_i x n_j block of its Hessian.
    """

    wrt: tuple[str, ...]
    loss: str | None
    matrix: Matrix
    _symbols: tuple[str, ...]
    _printed: Callable[[], tuple[Matrix, SizeNames, Stage]]
    _symbolic: Callable[[], Matrix]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.shape

    def dense(self) -> Tensor:
        """Return the matrix of numbers at the point."""
        result: Tensor = self.matrix.dense()
        return result

    def norm_bound(self) -> float:
        """Return an upper bound on the spectral norm, from the norms of the factors."""
        return self.matrix.norm_bound()

    def sympy(self) -> sympy.ImmutableDenseMatrix:
        """Return the matrix in SymPy symbols for every entry of the input and the parameters: for tiny sizes only."""
        return self._symbolic().sympy()

    @cached_property
    def _lines(self) -> list[tuple[str, str, str]]:
        """(name, formula, reason) in LaTeX, the result first and then what it refers to."""
        matrix, sizes, _ = self._printed()
        with dimensions(sizes):
            top = matrix.matrix if isinstance(matrix, Named) else matrix
            named = definitions(top)
            lines = [(self._left, top.latex(), "the chain rule to second order" if len(self.wrt) == 2 else "the chain rule")]
            return lines + [(d.symbol, d.matrix.latex(), d.reason) for d in named]

    @property
    def _left(self) -> str:
        what = "Z" if self.loss is None else r"\mathcal{L}"
        below = r"\,".join(rf"\partial {symbol}" for symbol in self._symbols)
        power = "^2" if len(self.wrt) == 2 else ""
        return rf"\frac{{\partial{power} {what}}}{{{below}}}"

    def latex(self, *, document: bool = False) -> str:
        r"""Return the derivation in LaTeX: the result, then each object that it refers to, one line each.

        Args:
            document: whether to return a file that compiles, in place of an ``align*`` environment.
        """
        rows = [rf"{name} &= {formula}" for name, formula in self._values]
        rows += [rf"{name} &= {formula}" for name, formula, _ in self._lines]
        body = "\\begin{align*}\n" + " \\\\\n".join(rows) + "\n\\end{align*}\n"
        if not document:
            return body
        head = "\\documentclass{article}\n\\usepackage{amsmath,amssymb}\n\\usepackage[landscape,margin=1cm]{geometry}\n"
        return head + "\\allowdisplaybreaks\n\\begin{document}\\small\\noindent\n" + body + "\\end{document}\n"

    @cached_property
    def _values(self) -> list[tuple[str, str]]:
        """(symbol, what it is) of the block's values, in the order of the computation."""
        Z = self._printed()[2]
        return [(stage.symbol, stage.rule) for stage in Z.story if stage.rule]

    def explain(self) -> str:
        """Return the derivation as text: the block's values, then each line of the formula with the rule that made it."""
        lines = [f"{plain(name)} = {plain(rule)}" for name, rule in self._values]
        for name, formula, reason in self._lines:
            lines += [f"{plain(name)} = {plain(formula)}", f"    {plain(reason)}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        rows, columns = self.shape
        lines = [f"{plain(name)} = {plain(formula)}" for name, formula, _ in self._lines]
        return "\n".join([lines[0] + f"      ({rows} x {columns})", *(f"    {line}" for line in lines[1:])])

    def _repr_html_(self) -> str:
        return f"<div>$$\n{html.escape(self.latex(), quote=False)}$$</div>"


def derive(
    block: TransformerBlock,
    *,
    wrt: str | Sequence[str] = ("query", "value"),
    inputs: Tensor | None = None,
    target: Tensor | None = None,
    loss: str | None = None,
    length: int = 3,
    seed: int = 0,
) -> Derivation:
    r"""Derive a block's Jacobian or second derivative in closed form.

    Args:
        block: A ``hessiankit.TransformerBlock`` of any placement, in float64 or float32.
        wrt: One or two parameters: dotted names, the letters of the papers ("W_Q", "Q", "1", "b_2"), or "query", "key",
            "value", "output", "up", "down", "gate", "input". A name alone, or one name: the Jacobian.
        inputs: One sequence, ``(L, d_model)`` or ``(1, L, d_model)``. By default one is drawn.
        target: For a loss: what the output is compared with. By default one is drawn.
        loss: ``"mse"`` (the mean of the squared differences), ``"cross_entropy"`` (of each token's output with a label)
            or ``None`` for the derivative of the output itself.
        length: Tokens to draw where no inputs are given.
        seed: Of what is drawn.

    Returns:
        A :class:`Derivation`; printing it shows the formula and the objects it refers to.

    Raises:
        InputError: If a name is not known, or the input or target does not fit.

    >>> import hessiankit as hk
    >>> print(hk.derive(hk.TransformerBlock(4, 5, affine=False), wrt="down"))
    ∂Z/∂W_2 = J_Z (σ(U) ⊗ I_d)      (12 x 20)
        J_Z = (diag(ρ_Z⁻¹) ⊗ I_d) (I_L ⊗ C_d - 1/d V_Z V_Zᵀ)
        V_Z = blockdiag_i(ŝ_i)
    """
    chosen = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    if not isinstance(block, TransformerBlock):
        raise InputError(f"derive: expected a hessiankit.TransformerBlock, got {type(block).__name__}")
    if not 1 <= len(chosen) <= 2:
        raise InputError(f"derive: wrt={wrt!r} names {len(chosen)} parameters; pass one for a Jacobian, two for a Hessian block")
    names = tuple(_resolve(block, name) for name in chosen)
    point = {name: p.detach() for name, p in block.named_parameters()}
    like = next(iter(point.values()))
    X = _sequence(block, inputs, length, seed, like)
    goal = _target(loss, target, X, seed)
    symbols: list[str] = []

    def build(parameters: Mapping[str, Array], tokens: Array, answer: Any, sizes: Sizes | None = None) -> tuple[Matrix, Stage]:
        parts = Parts(block, parameters, sizes=sizes)
        Z = block_stage(parts, input_stage(tokens))
        args = [parts.symbols.get(name, name) for name in names]
        symbols[:] = args
        return _read(Z, args, loss, answer), Z

    def printed() -> tuple[Matrix, SizeNames, Stage]:
        part = block.attention
        grouped = any(isinstance(m, GroupNorm) for m in block.modules())
        sizes = sizes_for(part.n_heads, part.n_kv_heads, rotary=part.rotary, groups=grouped)
        parameters, tokens = _of_other_sizes(block, sizes, seed)
        answer = _target(loss, None, tokens, seed)
        matrix, Z = build(parameters, tokens, answer, sizes)
        return matrix, SizeNames(sizes), Z

    def symbolic() -> Matrix:
        parameters = {name: _symbols_for(Parts(block, point).symbols[name], shape_of(p)) for name, p in point.items()}
        answer = _symbols_for("T", shape_of(X)) if loss == "mse" else goal
        return build(parameters, _symbols_for("X", shape_of(X)), answer)[0]

    matrix, _ = build(point, X, goal)
    return Derivation(names, loss, matrix, tuple(symbols), printed, symbolic)


def _read(Z: Stage, names: Sequence[str], loss: str | None, answer: Any) -> Matrix:
    if loss is None:
        return Z.jacobian(names[0]) if len(names) == 1 else Z.hessian(*names)
    outer = MeanSquaredErrorAt(Z.value, answer) if loss == "mse" else CrossEntropyAt(Z.value, answer)
    if len(names) == 1:
        return outer.jacobian(next(iter(outer.arguments))) @ Z.jacobian(names[0])
    return gauss_newton(outer, Z, *names).total


def _resolve(block: TransformerBlock, name: str) -> str:
    known = [n for n, _ in block.named_parameters()]
    if name in ("X", "input"):
        return "X"
    symbols = Parts(block, dict(block.named_parameters())).symbols
    for candidate in known:
        if name in (candidate, symbols[candidate], index_of(symbols[candidate])) or ALIASES.get(name) == candidate:
            return candidate
    words = [w for w, target in ALIASES.items() if target in known]
    raise unknown("derive", "wrt", name, [*known, *words, "X"])


def _sequence(block: TransformerBlock, inputs: Tensor | None, length: int, seed: int, like: Tensor) -> Tensor:
    if inputs is None:
        if length < 1:
            raise InputError(f"derive: length={length}, expected at least 1")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, block.d_model, generator=generator, dtype=torch.float64).to(like)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = getattr(inputs, "dtype", type(inputs).__name__)
        raise InputError(f"derive: inputs are {got}; pass a tensor of floating point, (L, {block.d_model})")
    X = inputs[0] if inputs.ndim == 3 and inputs.shape[0] == 1 else inputs
    if X.ndim != 2 or X.shape[1] != block.d_model or not X.shape[0]:
        raise InputError(
            f"derive: inputs have shape {tuple(inputs.shape)}; a formula is of one sequence, so pass (L, {block.d_model})"
        )
    if not bool(torch.isfinite(X).all()):
        raise InputError("derive: inputs hold NaN or infinite entries")
    return X.detach().to(like)


def _target(loss: str | None, target: Tensor | None, X: Tensor, seed: int) -> Any:
    length, d = X.shape
    generator = torch.Generator().manual_seed(seed + 1)
    if loss is None:
        return None
    if loss == "mse":
        drawn = torch.randn(length, d, generator=generator, dtype=torch.float64).to(X) if target is None else target.detach()
        drawn = drawn[0] if drawn.ndim == 3 and drawn.shape[0] == 1 else drawn
        if drawn.shape != X.shape:
            raise InputError(f"derive: the target has shape {tuple(drawn.shape)}, the output {tuple(X.shape)}")
        return drawn.to(X)
    if loss == "cross_entropy":
        labels = torch.randint(d, (length,), generator=generator) if target is None else target.reshape(-1)
        if labels.numel() != length or labels.is_floating_point() or not bool(((labels >= 0) & (labels < d)).all()):
            raise InputError(f"derive: cross_entropy needs {length} labels from 0 to {d - 1}, one for each token")
        return labels.tolist()
    raise InputError(f"derive: loss={loss!r} is not known; pass 'mse', 'cross_entropy' or None")


def _of_other_sizes(block: TransformerBlock, sizes: Sizes, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return parameters and tokens of a block of the same structure with other sizes."""
    part = block.attention
    d, heads, kv = sizes.width, sizes.heads, sizes.kv_heads
    widths: dict[str, tuple[int, ...]] = {
        "W_Q": (d, heads * sizes.query),
        "W_K": (d, kv * sizes.query),
        "W_V": (d, kv * sizes.value),
        "W_O": (heads * sizes.value, d),
        "W_1": (d, sizes.hidden),
        "W_G": (d, sizes.hidden),
        "W_2": (sizes.hidden, d),
    }
    widths |= {f"b_{name[2:]}": shape[1:] for name, shape in widths.items()}
    inner = {"norm_q": sizes.query, "norm_k": sizes.query, "norm_v": sizes.value, "norm_c": sizes.value}
    if part.norm_scope == "full":
        inner = {name: width * (kv if name in ("norm_k", "norm_v") else heads) for name, width in inner.items()}
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {}
    for name, p in block.named_parameters():
        *path, last = name.split(".")
        if last in widths:
            made[name] = draw(*widths[last])
        elif path and path[-1] in inner:
            made[name] = draw(inner[path[-1]])
        else:
            made[name] = draw(*((d,) if p.numel() == block.d_model else tuple(p.shape)))
    return made, draw(sizes.length, d)


def _symbols_for(letter: str, shape: tuple[int, ...]) -> Array:
    """Return an array of real symbols with indices from 1."""
    entries = np.empty(math.prod(shape), dtype=object)
    for k in range(entries.size):
        index = ",".join(str(i + 1) for i in np.unravel_index(k, shape)) if shape else ""
        entries[k] = sympy.Symbol(f"{letter}_{{{index}}}" if "_" not in letter else f"{letter}^{{{index}}}", real=True)
    return entries.reshape(shape)
