"""A block at a point: its parameters and its letters, and the stages that its branches and its norms are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from derivations.affine import AffineAt
from derivations.arrays import Array, is_exact
from derivations.group_normalization import GroupNormRowsAt
from derivations.linear_map import LinearMapAt
from derivations.matrix import Matrix
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed, Shape
from derivations.stage import Names, Stage
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.derivation.dimensions import Sizes
from hessiankit.derivation.symbols import index_of, plus, ring, row_of, symbol_of
from hessiankit.errors import InputError


@dataclass(frozen=True)
class Exact:
    """What exact arithmetic takes in place of the roots and exponentials of a block; nothing for floating point.

    Args:
        eps: (symbol of the norm's output, its input, the norm) -> one eps for each row, which makes its roots rational.
        weights: attention weights, stacked over the heads, in place of a softmax.
        scale: the factor of the logits.
        turns: cosines and sines of the rotary embedding, each L x d_K / 2.
        activation: a kind of ``derivations.activation`` in place of the network's, or of the gate's.
    """

    eps: Callable[[str, Array, nn.Module], Array] | None = None
    weights: Array | None = None
    scale: Any = None
    turns: tuple[Array, Array] | None = None
    activation: str | None = None


@dataclass
class BlockAt:
    """A block at a point.

    Args:
        block: whose structure is taken.
        parameters: the point: parameter of the block by its dotted name -> array.
        layer: which block of a stack it is, printed as an upper index; None for a block on its own.
        exact: what replaces irrational numbers in exact arithmetic.
        sizes: numbers of heads and groups to take in place of the block's; None for its own.
    """

    block: TransformerBlock
    parameters: Mapping[str, Array]
    layer: int | None = None
    exact: Exact = field(default_factory=Exact)
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        self.symbols = {name: self.letter(symbol_of(name)) for name, _ in self.block.named_parameters()}

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        source = self.block.attention if self.sizes is None else None
        if source is not None:
            return source.n_heads, source.n_kv_heads
        assert self.sizes is not None
        return self.sizes.heads, self.sizes.kv_heads

    def given(self, dotted: str) -> Array | None:
        """Return a parameter at the point, or None if the block has none of this name."""
        return self.parameters.get(dotted)

    def letter(self, symbol: str) -> str:
        """Return a symbol with the number of the block, where there are several."""
        return symbol if self.layer is None else f"{symbol}^{{({self.layer})}}"

    def stage(
        self,
        name: str,
        at: Operation,
        reads: Mapping[str, Stage],
        rule: str,
        *,
        alphabet: Mapping[str, str] | None = None,
        names: Names | None = None,
    ) -> Stage:
        """Return an operation as a stage in whose formulas its arguments go by the symbols of the stages they are."""
        letters = {**{argument: stage.symbol for argument, stage in reads.items()}, **(alphabet or {})}
        return Stage(name, at, reads, letters, rule, names, index_of)

    def affine(self, name: str, X: Stage, weight: str, bias: str) -> Stage:
        """Return X W + 1 b^T, without b where the block has none."""
        at = AffineAt(X.value, self.given(weight), self.given(bias))
        renamed = {arg: self.symbols[where] for arg, where in (("W", weight), ("b", bias)) if arg in at.arguments}
        rule = rf"{X.symbol}\,{renamed['W']}{plus(renamed.get('b'))}"
        return self.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=renamed)

    def map(self, name: str, X: Stage, matrix: Matrix, shape: Shape, rule: str) -> Stage:
        """Return a constant linear map of a stage."""
        return self.stage(name, LinearMapAt(X.value, matrix, shape), {"X": X}, rule)

    def norm(self, name: str, X: Stage, part: nn.Module, dotted: str) -> Stage:
        """Return a norm of a stage.

        Raises:
            InputError: If the norm has no chapter.
        """
        found = {arg: f"{dotted}.{p}" for arg, p in (("gamma", "weight"), ("beta", "bias")) if f"{dotted}.{p}" in self.parameters}
        arrays = {arg: self.given(where) for arg, where in found.items()}
        eps = _eps(part, X.value) if self.exact.eps is None else self.exact.eps(name, X.value, part)
        at: Operation
        if isinstance(part, nn.LayerNorm):
            at, kind = LayerNormAt(X.value, **arrays, eps=eps), "LayerNorm"
        elif isinstance(part, nn.RMSNorm):
            at, kind = RMSNormAt(X.value, **arrays, eps=eps), "RMSNorm"
        elif isinstance(part, GroupNorm):
            groups = part.groups if self.sizes is None else self.sizes.groups
            kind = {"layernorm": "GroupNorm", "rmsnorm": "GroupRMSNorm"}[part.kind]
            at = GroupNormRowsAt(X.value, groups, **arrays, eps=eps, kind=part.kind)
        else:
            raise InputError(f"derive: {dotted} is a {type(part).__name__}, which has no chapter; use layernorm or rmsnorm")
        renamed = {arg: self.symbols[where] for arg, where in found.items()}
        rule = rf"\mathrm{{{kind}}}({X.symbol})"
        alphabet, names = self._norm_alphabet(name, X.symbol, renamed), self._norm_names(name, X.symbol)
        return self.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=alphabet, names=names)

    def _norm_alphabet(self, name: str, X: str, renamed: Mapping[str, str]) -> dict[str, str]:
        """Letters for the row scales (rho), the normalised rows and their block diagonal V, one set for each norm.

        The chapter's hat, for rows before the gain, is a ring here: a hat is on what a norm returns.
        """
        rows = {r"\hat X": ring(X), r"\operatorname{vec}_r(\hat X)": rf"\operatorname{{vec}}_r({ring(X)})"}
        own = {"s": rf"\rho_{{{name}}}", "V": f"V_{{{name}}}", r"\gamma": renamed.get("gamma", r"\gamma")}
        return {**rows, **own, r"\hat x_i": rf"\mathring{{{row_of(X)[0]}}}_i", "x_i": row_of(X)}

    def _norm_names(self, name: str, X: str) -> Names:
        """J_Z and H_Z for the norm; H_tr for second derivatives of the block's output, as in the paper."""
        return Names(
            lambda a: f"J_{{{name}}}",
            lambda a, b: f"H_{{{name}}}" if a == b == X else f"H_{{{name},{a} {b}}}",
            lambda i: f"{name}_{{{i}}}",
            lambda i, j: f"{name}_{{{i},{j}}}",
        )


def _eps(part: nn.Module, X: Array) -> Any:
    """Return a norm's eps; RMSNorm takes the rounding unit of its input, or of float32, where none is given."""
    eps = getattr(part, "eps", None)
    if eps is None:
        return 0 if is_exact(X) else torch.finfo(torch.promote_types(X.dtype, torch.float32)).eps
    return Fraction(repr(eps)) if is_exact(X) else eps
