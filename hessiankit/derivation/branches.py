r"""The two branches of a block as stages: self-attention and the feed-forward network.

The attention of Closing the Curvature Gap (one head, no biases, no norms inside) is one stage with a chapter of its own, so
that its derivatives are G_k and Phi_kl. Any other attention is a chain of stages,

    Q = X W_Q + 1 b_Q^T,  split into heads (\check Q), normed (\hat Q), rotated (\tilde Q);   K and V likewise;
    T = Q K^T / sqrt(d_K),   A = softmax(T),   C = A V,  normed,  merged (O),   F = O W_O + 1 b_O^T .
"""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.activation import ActivationAt
from derivations.arrays import Array
from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import HadamardAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.matrix import Identity
from derivations.operation import Renamed, shape_of, size
from derivations.rotary import angles
from derivations.softmax import SoftmaxAt
from derivations.stage import Names, Stage
from hessiankit.blocks import Attention
from hessiankit.derivation.block_at import BlockAt
from hessiankit.derivation.symbols import hat, marked, plus, upper


def attention_stage(parts: BlockAt, name: str, X: Stage) -> Stage:
    """Return the self-attention branch of a block at a point."""
    if is_the_papers(parts.block.attention):
        return _papers_attention(parts, name, X)
    return _attention_chain(parts, name, X)


def is_the_papers(part: Attention) -> bool:
    """Tell whether an attention is that of Closing the Curvature Gap, which has a chapter of its own."""
    plain = part.n_heads == part.n_kv_heads == 1 and not part.rotary and part.b_Q is None and part.b_O is None
    return plain and all(getattr(part, f"norm_{letter}") is None for letter in "qkvc")


def _papers_attention(parts: BlockAt, name: str, X: Stage) -> Stage:
    part, exact = parts.block.attention, parts.exact
    at = AttentionAt(
        X.value,
        parts.given("attention.W_Q"),
        parts.given("attention.W_K"),
        parts.given("attention.W_V"),
        parts.given("attention.W_O"),
        mask=causal_mask(shape_of(X.value)[0], 1) if part.causal else None,
        scale=exact.scale,
        weights=exact.weights,
    )
    renamed = {w: parts.symbols[f"attention.{w}"] for w in at.arguments if w != "X"}
    x, logits = X.symbol, rf"{X.symbol}\,{renamed['W_Q']}\,{renamed['W_K']}^\top {X.symbol}^\top/\sqrt{{d_K}}"
    out = rf"\,{renamed['W_O']}" if "W_O" in renamed else ""
    rule = rf"A\,{x}\,{renamed['W_V']}{out},\quad A = \mathrm{{softmax}}(T)\text{{ by rows}},\quad T = {logits}"
    return parts.stage(name, Renamed(at, renamed), {"X": X}, rule, alphabet=renamed, names=_papers_names(name))


def _papers_names(name: str) -> Names:
    """Return the paper's names for the derivatives of F: G_k and Phi_kl."""
    up = upper(name)
    return Names(
        lambda a: f"J_{{{name} {a}}}",
        lambda a, b: rf"\Phi_{{{a},{b}}}{up}",
        lambda i: f"G_{{{i}}}{up}",
        lambda i, j: rf"\Phi_{{{i},{j}}}{up}",
    )


def _attention_chain(parts: BlockAt, name: str, X: Stage) -> Stage:
    part, exact = parts.block.attention, parts.exact
    heads, kv_heads = parts.heads
    length = shape_of(X.value)[0]
    Q = _projected(parts, "Q", X, heads, 1)
    K = _projected(parts, "K", X, kv_heads, heads // kv_heads)
    V = _projected(parts, "V", X, kv_heads, heads // kv_heads)
    each = r"\text{ for each head}" if heads > 1 else ""
    scores = HeadProductAt(Q.value, K.value, heads, "scores", exact.scale)
    T = parts.stage(parts.letter("T"), scores, {"P": Q, "R": K}, rf"{Q.symbol}{K.symbol}^\top/\sqrt{{d_K}}{each}")
    mask = causal_mask(length, heads) if part.causal else None
    softmax = SoftmaxAt(T.value, mask=mask, weights=exact.weights)
    A = parts.stage(parts.letter("A"), softmax, {"T": T}, rf"\mathrm{{softmax}}({T.symbol})\text{{ by rows}}")
    C = parts.stage(
        parts.letter("C"), HeadProductAt(A.value, V.value, heads, "mix"), {"P": A, "R": V}, f"{A.symbol}{V.symbol}{each}"
    )
    C = _normed(parts, "c", C, "head")
    if heads > 1:
        width = shape_of(C.value)[1]
        matrix, rule = merge_heads(length, heads, width), rf"{C.symbol}\text{{, heads side by side}}"
        C = parts.map(parts.letter("O"), C, matrix, (length, heads * width), rule)
    C = _normed(parts, "c", C, "full")
    if part.W_O is not None:
        return parts.affine(name, C, "attention.W_O", "attention.b_O")
    shape = shape_of(C.value)
    return parts.stage(name, LinearMapAt(C.value, Identity(size(shape)), shape), {"X": C}, C.symbol)


def _projected(parts: BlockAt, letter: str, X: Stage, heads: int, repeat: int) -> Stage:
    """Return queries, keys or values: projected, split into heads, normed, turned."""
    part = parts.block.attention
    stage = parts.affine(parts.letter(letter), X, f"attention.W_{letter}", f"attention.b_{letter}")
    stage = _normed(parts, letter.lower(), stage, "full")
    length, columns = shape_of(stage.value)
    width = columns // heads
    if heads * repeat > 1:
        shared = ", each for a group of queries" if repeat > 1 else ""
        rule = rf"{stage.symbol}\text{{, heads below each other{shared}}}"
        matrix = split_heads(length, heads, width, repeat)
        stage = parts.map(marked("check", parts.letter(letter)), stage, matrix, (heads * repeat * length, width), rule)
    stage = _normed(parts, letter.lower(), stage, "head")
    if part.rotary and letter in "QK":
        cos, sin = parts.exact.turns or _turns(length, width, part.rotary_theta, stage.value)
        turns = rotary(length, width, heads * repeat, part.rotary_theta, cos=cos, sin=sin)
        turned = marked("tilde", parts.letter(letter))
        stage = parts.map(turned, stage, turns, shape_of(stage.value), rf"{stage.symbol}\text{{, rows turned by }}R_l")
    return stage


def _turns(length: int, width: int, theta: float, like: Array) -> tuple[Array | None, Array | None]:
    """Return cosines and sines, each L x d_K / 2, in the precision of the values that they turn."""
    if not isinstance(like, Tensor):
        return None, None
    half = angles(length, width, theta).to(like.device)
    return half.cos().to(like.dtype), half.sin().to(like.dtype)


def _normed(parts: BlockAt, letter: str, stage: Stage, scope: str) -> Stage:
    """Return queries, keys, values or context after their norm, if they have one and this is its place."""
    part = parts.block.attention
    norm = getattr(part, f"norm_{letter}")
    if norm is None or part.norm_scope != scope:
        return stage
    return parts.norm(hat(parts.letter(letter.upper())), stage, norm, f"attention.norm_{letter}")


def causal_mask(length: int, heads: int) -> Tensor:
    """Return the (H L) x L mask, True where a token may look.

    >>> causal_mask(2, 1).tolist()
    [[True, False], [True, True]]
    """
    return torch.ones(length, length, dtype=torch.bool).tril().repeat(heads, 1)


def feedforward_stage(parts: BlockAt, name: str, Y: Stage) -> Stage:
    """Return the feed-forward branch of a block at a point."""
    if parts.block.feedforward.W_G is not None:
        return _gated(parts, name, Y)
    at = FeedForwardAt(
        Y.value,
        parts.given("feedforward.W_1"),
        parts.given("feedforward.W_2"),
        parts.given("feedforward.b_1"),
        parts.given("feedforward.b_2"),
        parts.exact.activation or parts.block.feedforward.activation,
        residual=False,
    )
    renamed = {w: parts.symbols[f"feedforward.{w}"] for w in at.arguments if w != "Y"}
    U = parts.letter("U")
    inner = rf"{U} = {Y.symbol}\,{renamed['W_1']}" + plus(renamed.get("b_1"))
    rule = rf"\sigma({U})\,{renamed['W_2']}{plus(renamed.get('b_2'))},\quad {inner}"
    return parts.stage(name, Renamed(at, renamed), {"Y": Y}, rule, alphabet={**renamed, "U": U})


def _gated(parts: BlockAt, name: str, Y: Stage) -> Stage:
    U = parts.affine(parts.letter("U"), Y, "feedforward.W_1", "feedforward.b_1")
    U_G = parts.affine(parts.letter("U_G"), Y, "feedforward.W_G", "feedforward.b_G")
    gate = parts.stage(
        parts.letter(r"\Gamma"), ActivationAt(parts.exact.activation or "silu", U_G.value), {"X": U_G}, rf"\sigma({U_G.symbol})"
    )
    product = HadamardAt(gate.value, U.value)
    P = parts.stage(parts.letter("P"), product, {"X": gate, "Y": U}, rf"{gate.symbol}\odot {U.symbol}")
    return parts.affine(name, P, "feedforward.W_2", "feedforward.b_2")
