"""App. E: formulas for positions of the norms, Eqs. 35-52."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hessiankit.blocks import placements as eq
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, small, wrong
from hessiankit.ledger.hybridnorm.definitions import LETTERS, HeadPoint, closed_attention, mha, rms_norm, swiglu
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


def family(seed: int, name: str, before: bool, after: bool) -> Evidence:
    """Compare a family of placements, # = QKVC, ..., KC, with its two equations."""
    found = []
    for normed in INSIDE:

        def written(X: Tensor, W: dict[str, Tensor], normed: str = normed) -> Tensor:
            Y = mha(rms_norm(X) if before else X, W, HEADS, normed) + X
            return swiglu(rms_norm(Y), W) + (rms_norm(Y) if after else Y)

        found += errors(seed, name.replace("#", normed), written)
    return small(found, "six sets of norms: the block against the print, its Jacobian w.r.t. W_Q against autograd")


def pre_post(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 49 and 50."""
    Y = mha(rms_norm(X), W, HEADS) + X
    return swiglu(rms_norm(Y), W) + rms_norm(Y)


def post_pre(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 51 and 52."""
    Y = mha(rms_norm(X), W, HEADS) + rms_norm(X)
    return swiglu(rms_norm(Y), W) + Y


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
