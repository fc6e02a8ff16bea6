"""App. E: formulas for positions of the norms, Eqs. 35-52."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hessiankit.blocks import PLACEMENTS
from hessiankit.blocks import placements as eq
from hessiankit.blocks.attention import Attention
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, small, wrong
from hessiankit.ledger.hybridnorm.definitions import LETTERS, HeadPoint, attn, closed_attention, mha, rms_norm, swiglu
from hessiankit.ledger.hybridnorm.equations import HEADS, errors, generic, make
from hessiankit.ledger.hybridnorm.jacobians import dense
from hessiankit.ledger.registry import claim

INSIDE = ("qkvc", "qkv", "qkc", "qk", "kv", "kc")


def attention(seed: int, normed: str, printed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """Compare attn_#: its composed closed form and Jacobians with the print."""
    head = HeadPoint.draw(Draw(seed))

    def written(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor) -> Tensor:
        return printed(X @ W_Q, X @ W_K, X @ W_V) @ W_O

    closed = closed_attention(head, normed)
    found, reference = [closed.value], [written(head.X, *head.weights)]
    for k, letter in enumerate(LETTERS):
        found.append(dense(closed.jacobian(letter)))
        reference.append(jacobian_of(written, head.X, *head.weights, wrt=1 + k))
    return agrees(found, reference, "value and four Jacobians in closed form, against autograd of the print")


def weights(Q: Tensor, K: Tensor) -> Tensor:
    """Return softmax(Q K^T / sqrt(d_k))."""
    return (Q @ K.T / Q.shape[1] ** 0.5).softmax(-1)


@claim("hybridnorm/eq35", "App. E, Eq. 35", "HOLDS", uses=[Attention])
def eq35(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{QK} = \mathrm{softmax}(N(Q)N(K)^\top/\sqrt{d_k})V$"""
    return attention(seed, "qk", lambda Q, K, V: weights(rms_norm(Q), rms_norm(K)) @ V)


@claim("hybridnorm/eq36", "App. E, Eq. 36", "HOLDS", uses=[Attention])
def eq36(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{KV} = \mathrm{softmax}(Q N(K)^\top/\sqrt{d_k})N(V)$"""
    return attention(seed, "kv", lambda Q, K, V: weights(Q, rms_norm(K)) @ rms_norm(V))


@claim("hybridnorm/eq37", "App. E, Eq. 37", "HOLDS", uses=[Attention])
def eq37(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{QKVC} = N(\mathrm{softmax}(N(Q)N(K)^\top/\sqrt{d_k})N(V))$"""
    return attention(seed, "qkvc", lambda Q, K, V: rms_norm(weights(rms_norm(Q), rms_norm(K)) @ rms_norm(V)))


@claim("hybridnorm/eq38", "App. E, Eq. 38", "HOLDS", uses=[Attention])
def eq38(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{QKC} = N(\mathrm{softmax}(N(Q)N(K)^\top/\sqrt{d_k})V)$"""
    return attention(seed, "qkc", lambda Q, K, V: rms_norm(weights(rms_norm(Q), rms_norm(K)) @ V))


@claim("hybridnorm/eq39", "App. E, Eq. 39", "HOLDS", uses=[Attention])
def eq39(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{KC} = N(\mathrm{softmax}(Q N(K)^\top/\sqrt{d_k})V)$"""
    return attention(seed, "kc", lambda Q, K, V: rms_norm(weights(Q, rms_norm(K)) @ V))


@claim("hybridnorm/eq40", "App. E, Eq. 40", "HOLDS", uses=[Attention])
def eq40(seed: int) -> Evidence:
    r"""$\mathrm{MHA}_\#(X) = \mathrm{Concat}(\mathrm{head}_1,\ldots,\mathrm{head}_h)W^O$ with $\mathrm{head}_i =
    \mathrm{attn}_\#(Q_i,K_i,V_i)$, the norms on each head"""
    found, reference = [], []
    for normed in INSIDE:
        draw = Draw(seed)
        block = make(f"{normed}-post")
        W, X = generic(block, draw), draw.normal(3, 6)
        heads = [attn(Q, K, V, normed) for Q, K, V in zip(*(torch.chunk(X @ W[n], HEADS, 1) for n in LETTERS[:3]), strict=True)]
        found.append(block.attention(X))
        reference.append(sum(head @ W["W_O"][3 * h : 3 * h + 3] for h, head in enumerate(heads)))
    return agrees(found, reference, "six sets of norms, two heads")


def family(seed: int, name: str, before: bool, after: bool) -> Evidence:
    """Compare a family of placements, # = QKVC, ..., KC, with its two equations."""
    found = []
    for normed in INSIDE:

        def written(X: Tensor, W: dict[str, Tensor], normed: str = normed) -> Tensor:
            Y = mha(rms_norm(X) if before else X, W, HEADS, normed) + X
            return swiglu(rms_norm(Y), W) + (rms_norm(Y) if after else Y)

        found += errors(seed, name.replace("#", normed), written)
    return small(found, "six sets of norms: the block against the print, its Jacobian w.r.t. W_Q against autograd")


@claim("hybridnorm/eq41-42", "App. E, Eqs. 41-42", "HOLDS", uses=[eq.bare_post])
def eq41(seed: int) -> Evidence:
    r"""#-Post: $Y = \mathrm{MHA}_\#(X) + X$, $X' = \mathrm{FFN}(N(Y)) + N(Y)$"""
    return family(seed, "#-post", before=False, after=True)


@claim("hybridnorm/eq43-44", "App. E, Eqs. 43-44", "HOLDS", uses=[eq.bare_pre])
def eq43(seed: int) -> Evidence:
    r"""#-Pre: $Y = \mathrm{MHA}_\#(X) + X$, $X' = \mathrm{FFN}(N(Y)) + Y$"""
    return family(seed, "#-pre", before=False, after=False)


@claim("hybridnorm/eq45-46", "App. E, Eqs. 45-46", "HOLDS", uses=[eq.pre_post])
def eq45(seed: int) -> Evidence:
    r"""Pre-#-Post: $Y = \mathrm{MHA}_\#(N(X)) + X$, $X' = \mathrm{FFN}(N(Y)) + N(Y)$"""
    return family(seed, "pre-#-post", before=True, after=True)


@claim("hybridnorm/eq47-48", "App. E, Eqs. 47-48", "HOLDS", uses=[eq.pre])
def eq47(seed: int) -> Evidence:
    r"""Pre-#-Pre: $Y = \mathrm{MHA}_\#(N(X)) + X$, $X' = \mathrm{FFN}(N(Y)) + Y$"""
    return family(seed, "pre-#-pre", before=True, after=False)


def pre_post(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 49 and 50."""
    Y = mha(rms_norm(X), W, HEADS) + X
    return swiglu(rms_norm(Y), W) + rms_norm(Y)


def post_pre(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 51 and 52."""
    Y = mha(rms_norm(X), W, HEADS) + rms_norm(X)
    return swiglu(rms_norm(Y), W) + Y


@claim("hybridnorm/eq49-50", "App. E, Eqs. 49-50", "HOLDS", uses=[eq.pre_post])
def eq49(seed: int) -> Evidence:
    r"""Pre-Post: $Y = \mathrm{MHA}(N(X)) + X$, $X' = \mathrm{FFN}(N(Y)) + N(Y)$"""
    return small(errors(seed, "pre-post", pre_post), "the block against the print, its Jacobian w.r.t. W_Q against autograd")


@claim("hybridnorm/eq51-52", "App. E, Eqs. 51-52", "HOLDS", uses=[eq.post_pre])
def eq51(seed: int) -> Evidence:
    r"""Post-Pre: $Y = \mathrm{MHA}(N(X)) + N(X)$, $X' = \mathrm{FFN}(N(Y)) + Y$"""
    return small(errors(seed, "post-pre", post_pre), "the block against the print, its Jacobian w.r.t. W_Q against autograd")


@claim("hybridnorm/pre-qkv-pre-in-words", "Sec. 4.4, Normalization Position", "WRONG AS PRINTED", uses=[eq.pre])
def pre_qkv_pre_in_words(seed: int) -> Evidence:
    """in Pre-QKV-Pre, 'the FFN layer utilizes Post-Norm'

    Correct: Pre-Norm, as in Eq. 48 and in the name; Pre-QKV-Post is the other one
    """
    draw = Draw(seed)
    block, told = make("pre-qkv-pre"), make("pre-qkv-post")
    W, X = generic(block, draw), draw.normal(3, 6)
    told.load_state_dict(block.state_dict())
    Y = mha(rms_norm(X), W, HEADS, "qkv") + X
    return wrong(told(X), swiglu(rms_norm(Y), W) + Y, "the words against Eqs. 47-48", corrected=block(X), above=0.02)


@claim("hybridnorm/pre-post-opposite", "Sec. 4.4, Normalization Position", "HOLDS", uses=[eq.pre_post, eq.post_pre])
def pre_post_opposite(seed: int) -> Evidence:
    """Pre-Post has Pre-Norm in the MHA and Post-Norm in the FFN, Post-Pre the opposite"""
    both = [*errors(seed, "pre-post", pre_post), *errors(seed, "post-pre", post_pre)]
    shifted = PLACEMENTS["post-shifted"].equation is eq.post_shifted
    return small([*both, 0.0 if shifted else 1.0], "with Post in the sense of App. E, the norm in front of branch and residual")
