r"""A block at a point: its parameters and its letters, and its branches and norms as stages.

The attention of Closing the Curvature Gap (one head, no biases, no norms inside) is one stage with a chapter of its own, so
that its derivatives are G_k and Phi_kl. Any other attention is a chain of stages,

    Q = X W_Q + 1 b_Q^T,  split into heads (\check Q), normed (\hat Q), rotated (\tilde Q);   K and V likewise;
    T = Q K^T / sqrt(d_K),   A = softmax(T),   C = A V,  normed,  merged (O),   F = O W_O + 1 b_O^T .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from derivations.activation import ActivationAt
from derivations.activation_functions import Kind
from derivations.affine import AffineAt
from derivations.arrays import Array, is_exact, symbolic
from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import HadamardAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.matrix import Identity, Matrix
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed, Shape, shape_of, size
from derivations.rotary_angles import angles
from derivations.softmax import SoftmaxAt
from derivations.stage import Names, Stage, names_after
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.blocks.norms import GroupNorm, norm_of
from hessiankit.support.errors import InputError
from hessiankit.theory.formulas.recording import Parameter, StageValue, run
from hessiankit.theory.formulas.symbols import Factor, base_of, index_of, marked, plus, row_of, spelling, symbol_of


@dataclass(frozen=True)
class Exact:
    """Numbers of exact arithmetic in place of the roots and exponentials of a block; none for floating point."""

    # (symbol of the norm's output, its input, the norm) -> one eps for each row, which makes its roots rational
    eps: Callable[[str, Array, nn.Module], Array] | None = None
    weights: Array | None = None  # attention weights, stacked over the heads, in place of a softmax
    scale: Any = None  # the factor of the logits
    turns: tuple[Array, Array] | None = None  # cosines and sines of the rotary embedding, each L x d_K / 2
    activation: Kind | None = None  # an activation in place of the network's, or of the gate's


@dataclass
class BlockAt:
    """A block at a point, under the names that its equation uses."""

    block: TransformerBlock  # its structure: heads, kinds of norms, masks, equation
    parameters: Mapping[str, Array]  # the point: parameter of the block by its dotted name -> array
    exact: Exact = field(default_factory=Exact)  # what replaces irrational numbers in exact arithmetic
    sizes: Mapping[str, int] | None = None  # numbers of heads and groups in place of the block's; None for its own
    spelt: bool = False  # whether the number ``b.factor`` of an equation is a letter

    def __post_init__(self) -> None:
        self.symbols = {name: symbol_of(name) for name, _ in self.block.named_parameters()}
        self.sums = ["R", "S"]

    def attention(self, X: StageValue) -> StageValue:
        """The self-attention branch, F."""
        return StageValue(lambda name: attention_stage(self, name, X.stage), lambda: "F", self.sums)

    def feedforward(self, Y: StageValue) -> StageValue:
        """The feed-forward branch, M."""
        return StageValue(lambda name: feedforward_stage(self, name, Y.stage), lambda: "M", self.sums)

    def __getattr__(self, name: str) -> Any:
        """Norms, the factor and parameters of the block."""
        if name.startswith("__") or "block" not in self.__dict__:
            raise AttributeError(name)
        part = getattr(self.block, name)
        if isinstance(part, nn.Parameter):
            return Parameter(self.symbols[name], self.parameters[name])
        if isinstance(part, nn.Module):
            return lambda X: StageValue(
                lambda symbol: self.norm(symbol, X.stage, part, name), lambda: marked("hat", X.stage.symbol), self.sums
            )
        if name == "factor" and self.spelt and (letter := spelling(self.block)) is not None:
            return Factor(part, letter[0])
        return part

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        part = self.block.attention
        return (part.n_heads, part.n_kv_heads) if self.sizes is None else (self.sizes["H"], self.sizes[r"H_{KV}"])

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
        """Return an operation as a stage in whose formulas its arguments have the symbols of the stages that it reads."""
        letters = {**{argument: stage.symbol for argument, stage in reads.items()}, **(alphabet or {})}
        return Stage(name, at, reads, letters, rule, names, index_of)

    def affine(self, name: str, X: Stage, weight: str, bias: str) -> Stage:
        """Return X W + 1 b^T, without b where the block has none."""
        at = AffineAt(X.value, self.parameters.get(weight), self.parameters.get(bias))
        renamed = {arg: self.symbols[where] for arg, where in (("W", weight), ("b", bias)) if arg in at.arguments}
        rule = rf"{X.symbol}\,{renamed['W']}{plus(renamed.get('b'))}"
        return self.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=renamed)

    def map(self, name: str, X: Stage, matrix: Matrix, shape: Shape, rule: str) -> Stage:
        """Return a constant linear map of a stage."""
        return self.stage(name, LinearMapAt(X.value, matrix, shape), {"X": X}, rule)

    def norm(self, name: str, X: Stage, part: nn.Module, dotted: str) -> Stage:
        """Return a norm of a stage; an InputError if the norm has no chapter."""
        if not isinstance(part, (nn.LayerNorm, nn.RMSNorm, GroupNorm)):
            raise InputError(f"derive: {dotted} is a {type(part).__name__}, which has no chapter; use layernorm or rmsnorm")
        names = {"gamma": f"{dotted}.weight", "beta": f"{dotted}.bias"}
        names = {argument: parameter for argument, parameter in names.items() if parameter in self.parameters}
        arrays = {argument: self.parameters[parameter] for argument, parameter in names.items()}
        renamed = {argument: self.symbols[parameter] for argument, parameter in names.items()}
        kind, groups, own_eps = norm_of(part, getattr(X.value, "dtype", None))
        eps: Any = Fraction(repr(own_eps)) if is_exact(X.value) else own_eps
        eps = eps if self.exact.eps is None else self.exact.eps(name, X.value, part)
        at: Operation
        if isinstance(part, GroupNorm):
            at = GroupNormRowsAt(X.value, self.sizes["g"] if self.sizes else groups, **arrays, eps=eps, kind=kind)
            title = {"layernorm": "GroupNorm", "rmsnorm": "GroupRMSNorm"}[kind]
        else:
            chapter, title = {"layernorm": (LayerNormAt, "LayerNorm"), "rmsnorm": (RMSNormAt, "RMSNorm")}[kind]
            at = chapter(X.value, **arrays, eps=eps)
        rule = rf"\mathrm{{{title}}}({X.symbol})"
        alphabet, called = norm_alphabet(name, X.symbol, renamed.get("gamma", r"\gamma")), norm_names(name, X.symbol)
        return self.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=alphabet, names=called)


def norm_alphabet(name: str, X: str, gain: str = r"\gamma") -> dict[str, str]:
    """Letters for the row scales (rho), the normalised rows and their block diagonal V, one set for each norm.

    The chapter's hat, for rows before the gain, is a ring here: a hat is on what a norm returns.
    """
    ring = marked("mathring", base_of(X))
    rows = {r"\hat X": ring, r"\operatorname{vec}_r(\hat X)": rf"\operatorname{{vec}}_r({ring})"}
    letters = {"s": rf"\rho_{{{name}}}", "V": f"V_{{{name}}}", r"\gamma": gain}
    return {**rows, **letters, r"\hat x_i": rf"\mathring{{{row_of(X)[0]}}}_i", "x_i": row_of(X)}


def norm_names(name: str, X: str) -> Names:
    """J_Z and H_Z for the norm; H_tr for second derivatives of the block's output, as in the paper."""
    plain = names_after(name)
    return replace(
        plain,
        slope=lambda a: f"J_{{{name}}}",
        curvature=lambda a, b: f"H_{{{name}}}" if a == b == X else plain.curvature(a, b),
    )


def attention_stage(parts: BlockAt, name: str, X: Stage) -> Stage:
    """Return the self-attention branch of a block at a point."""
    return (_papers_attention if is_the_papers(parts.block.attention) else _attention_chain)(parts, name, X)


def is_the_papers(part: Attention) -> bool:
    """Tell whether an attention is that of Closing the Curvature Gap, which has a chapter of its own."""
    plain = part.n_heads == part.n_kv_heads == 1 and not part.rotary and part.b_Q is None and part.b_O is None
    return plain and all(getattr(part, f"norm_{letter}") is None for letter in "qkvc")


def _papers_attention(parts: BlockAt, name: str, X: Stage) -> Stage:
    part, exact = parts.block.attention, parts.exact
    weights = {name: parts.parameters.get(f"attention.{name}") for name in ("W_Q", "W_K", "W_V", "W_O")}
    mask = causal_mask(shape_of(X.value)[0], 1) if part.causal else None
    at = AttentionAt(X.value, **weights, mask=mask, scale=exact.scale, weights=exact.weights)
    renamed = {w: parts.symbols[f"attention.{w}"] for w in at.arguments if w != "X"}
    x, logits = X.symbol, rf"{X.symbol}\,{renamed['W_Q']}\,{renamed['W_K']}^\top {X.symbol}^\top/\sqrt{{d_K}}"
    out = rf"\,{renamed['W_O']}" if "W_O" in renamed else ""
    rule = rf"A\,{x}\,{renamed['W_V']}{out},\quad A = \mathrm{{softmax}}(T)\text{{ by rows}},\quad T = {logits}"
    phi = r"\Phi_{{{},{}}}".format  # the paper's names for the derivatives of F
    names = replace(names_after(name), curvature=phi, first="G_{{{}}}".format, second=phi)
    return parts.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=renamed, names=names)


def _attention_chain(parts: BlockAt, name: str, X: Stage) -> Stage:
    part, exact = parts.block.attention, parts.exact
    heads, kv_heads = parts.heads
    length = shape_of(X.value)[0]
    Q = _projected(parts, "Q", X, heads, 1)
    K = _projected(parts, "K", X, kv_heads, heads // kv_heads)
    V = _projected(parts, "V", X, kv_heads, heads // kv_heads)
    mask = causal_mask(length, heads) if part.causal else None
    C = weighted_values(parts.stage, "TAC", (Q, K, V), heads, exact.scale, mask, exact.weights)
    C = _normed(parts, "c", C, "head")
    if heads > 1:
        width = shape_of(C.value)[1]
        matrix, rule = merge_heads(length, heads, width), rf"{C.symbol}\text{{, heads side by side}}"
        C = parts.map("O", C, matrix, (length, heads * width), rule)
    C = _normed(parts, "c", C, "full")
    if part.W_O is not None:
        return parts.affine(name, C, "attention.W_O", "attention.b_O")
    shape = shape_of(C.value)
    return parts.stage(name, LinearMapAt(C.value, Identity(size(shape)), shape), {"X": C}, C.symbol)


def weighted_values(
    stage: Callable[..., Stage],
    symbols: Sequence[str],
    parts: Sequence[Stage],
    heads: int,
    scale: Any,
    mask: Any,
    weights: Any = None,
) -> Stage:
    """Return softmax(c Q K^T) V head by head, in stages for logits, weights and values under three symbols.

    ``stage`` makes a stage of a symbol, an operation, the stages that it reads and its rule.
    """
    Q, K, V = parts
    t, a, f = symbols
    per_head = r"\text{ for each head}" if heads > 1 else ""
    scores = HeadProductAt(Q.value, K.value, heads, "scores", scale)
    T = stage(t, scores, {"P": Q, "R": K}, rf"{Q.symbol}{K.symbol}^\top/\sqrt{{d_K}}{per_head}")
    softmax = SoftmaxAt(T.value, mask=mask, weights=weights)
    A = stage(a, softmax, {"T": T}, rf"\mathrm{{softmax}}({T.symbol})\text{{ by rows}}")
    return stage(f, HeadProductAt(A.value, V.value, heads, "mix"), {"P": A, "R": V}, f"{A.symbol}{V.symbol}{per_head}")


def _projected(parts: BlockAt, letter: str, X: Stage, heads: int, repeat: int) -> Stage:
    """Return queries, keys or values: projected, split into heads, normed, turned."""
    part = parts.block.attention
    stage = parts.affine(letter, X, f"attention.W_{letter}", f"attention.b_{letter}")
    stage = _normed(parts, letter.lower(), stage, "full")
    length, columns = shape_of(stage.value)
    width = columns // heads
    if heads * repeat > 1:
        group_note = ", each for a group of queries" if repeat > 1 else ""
        rule = rf"{stage.symbol}\text{{, heads below each other{group_note}}}"
        matrix = split_heads(length, heads, width, repeat)
        stage = parts.map(marked("check", letter), stage, matrix, (heads * repeat * length, width), rule)
    stage = _normed(parts, letter.lower(), stage, "head")
    if part.rotary and letter in "QK":
        cos, sin = parts.exact.turns or _turns(length, width, part.rotary_theta, stage.value)
        turns = rotary(length, width, heads * repeat, part.rotary_theta, cos=cos, sin=sin)
        rotated_symbol = marked("tilde", letter)
        stage = parts.map(rotated_symbol, stage, turns, shape_of(stage.value), rf"{stage.symbol}\text{{, rows turned by }}R_l")
    return stage


def _turns(length: int, width: int, theta: float, like: Array) -> tuple[Array, Array]:
    """Return cosines and sines, each L x d_K / 2, in the precision of the values that they rotate, or exact."""
    if not isinstance(like, Tensor):
        frequencies = [sympy.Rational(theta) ** sympy.Rational(-2 * i, width) for i in range(width // 2)]
        exact = np.array([[position * angle for angle in frequencies] for position in range(length)], dtype=object)
        return symbolic("cos", exact), symbolic("sin", exact)
    half = angles(length, width, theta).to(like.device)
    return half.cos().to(like.dtype), half.sin().to(like.dtype)


def _normed(parts: BlockAt, letter: str, stage: Stage, scope: str) -> Stage:
    """Return queries, keys, values or context after their norm, if they have one at this place."""
    part = parts.block.attention
    norm = getattr(part, f"norm_{letter}")
    if norm is None or part.norm_scope != scope:
        return stage
    return parts.norm(marked("hat", letter.upper()), stage, norm, f"attention.norm_{letter}")


def causal_mask(length: int, heads: int) -> Tensor:
    """Return the (H L) x L mask, True where a token may look.

    >>> causal_mask(2, 1).tolist()
    [[True, False], [True, True]]
    """
    return torch.ones(length, length, dtype=torch.bool, device="cpu").tril().repeat(heads, 1)


def feedforward_stage(parts: BlockAt, name: str, Y: Stage) -> Stage:
    """Return the feed-forward branch of a block at a point."""
    if parts.block.feedforward.W_G is not None:
        return _gated(parts, name, Y)
    arrays = {name: parts.parameters.get(f"feedforward.{name}") for name in ("W_1", "W_2", "b_1", "b_2")}
    activation = parts.exact.activation or parts.block.feedforward.activation
    at = FeedForwardAt(Y.value, **arrays, activation=activation, residual=False)
    renamed = {w: parts.symbols[f"feedforward.{w}"] for w in at.arguments if w != "Y"}
    inner = rf"U = {Y.symbol}\,{renamed['W_1']}" + plus(renamed.get("b_1"))
    rule = rf"\sigma(U)\,{renamed['W_2']}{plus(renamed.get('b_2'))},\quad {inner}"
    return parts.stage(name, Renamed(at, renamed), {"Y": Y}, rule, alphabet={**renamed, "U": "U"})


def _gated(parts: BlockAt, name: str, Y: Stage) -> Stage:
    U = parts.affine("U", Y, "feedforward.W_1", "feedforward.b_1")
    U_G = parts.affine("U_G", Y, "feedforward.W_G", "feedforward.b_G")
    gate = parts.stage(r"\Gamma", ActivationAt(parts.exact.activation or "silu", U_G.value), {"X": U_G}, rf"\sigma({U_G.symbol})")
    product = HadamardAt(gate.value, U.value)
    P = parts.stage("P", product, {"X": gate, "Y": U}, rf"{gate.symbol}\odot {U.symbol}")
    return parts.affine(name, P, "feedforward.W_2", "feedforward.b_2")


def block_stage(parts: BlockAt, X: Stage) -> Stage:
    """Return the output of a block as a stage on its parameters and its input."""
    return run(parts.block.equation, parts, StageValue(lambda name: X, lambda: X.symbol, parts.sums))
