"""The norm placements, each as its equation: Y is the stream after attention, the result the stream after the network.

``b`` is a block: ``b.attention`` (with the norms of queries, keys, values and context inside), ``b.feedforward``, ``b.norm_1``
of the attention and ``b.norm_2`` of the network, ``b.norm_3`` and ``b.norm_4`` where a sub-layer has a second norm; ``b.factor``
is a Python float, ``b.omega_1``, ``b.lambda_1``, ... are parameters. An equation uses these, ``+``, ``float * X`` and
``X * parameter``, nothing else: no shapes, no torch. So the same function also runs on symbols, with a stand-in for ``b``, and
gives the closed forms of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Equation = Callable[[Any, Any], Any]
"""(block, X) -> X of the next block."""


def post(b: Any, X: Any) -> Any:
    """Post-Norm (Vaswani et al. 2017)."""
    Y = b.norm_1(X + b.attention(X))
    return b.norm_2(Y + b.feedforward(Y))


def post_shifted(b: Any, X: Any) -> Any:
    """Post-Norm with the norm in front, feeding branch and residual (HybridNorm, App. E)."""
    N = b.norm_1(X)
    Y = b.norm_2(N + b.attention(N))
    return Y + b.feedforward(Y)


def pre(b: Any, X: Any) -> Any:
    """Pre-Norm."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def bare_post(b: Any, X: Any) -> Any:
    """#-Post: no norm before the attention; the network's norm feeds its residual too. HybridNorm with # = QKV."""
    Y = b.norm_2(X + b.attention(X))
    return Y + b.feedforward(Y)


def bare_pre(b: Any, X: Any) -> Any:
    """#-Pre: no norm before the attention; the network's norm feeds the branch only."""
    Y = X + b.attention(X)
    return Y + b.feedforward(b.norm_2(Y))


def pre_post(b: Any, X: Any) -> Any:
    """Pre-#-Post: the attention's norm feeds the branch only, the network's feeds its residual too."""
    Y = b.norm_2(X + b.attention(b.norm_1(X)))
    return Y + b.feedforward(Y)


def post_pre(b: Any, X: Any) -> Any:
    """Post-Pre: the attention's norm feeds its residual too, the network's feeds the branch only."""
    N = b.norm_1(X)
    Y = N + b.attention(N)
    return Y + b.feedforward(b.norm_2(Y))


def lns(b: Any, X: Any) -> Any:
    """LayerNorm Scaling: each norm's output times 1 / sqrt(l)."""
    Y = X + b.attention(b.factor * b.norm_1(X))
    return Y + b.feedforward(b.factor * b.norm_2(Y))


def lns_before_ln(b: Any, X: Any) -> Any:
    """LNS in front of the norms, which undo it up to eps."""
    Y = X + b.attention(b.norm_1(b.factor * X))
    return Y + b.feedforward(b.norm_2(b.factor * Y))


def lns_after_branch(b: Any, X: Any) -> Any:
    """LNS on what the branches return."""
    Y = X + b.factor * b.attention(b.norm_1(X))
    return Y + b.factor * b.feedforward(b.norm_2(Y))


def lns_after_residual(b: Any, X: Any) -> Any:
    """LNS on the stream, after each sum."""
    Y = b.factor * (X + b.attention(b.norm_1(X)))
    return b.factor * (Y + b.feedforward(b.norm_2(Y)))


def lns_after_attention(b: Any, X: Any) -> Any:
    """LNS on what the attention returns, not on the network."""
    Y = X + b.factor * b.attention(b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def lns_after_ffn(b: Any, X: Any) -> Any:
    """LNS on what the network returns, not on the attention."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.factor * b.feedforward(b.norm_2(Y))


def lns_attention_ln(b: Any, X: Any) -> Any:
    """LNS on the attention's norm only."""
    Y = X + b.attention(b.factor * b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def lns_ffn_ln(b: Any, X: Any) -> Any:
    """LNS on the network's norm only."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.feedforward(b.factor * b.norm_2(Y))


def deepnorm(b: Any, X: Any) -> Any:
    """Post-Norm with the residual times DeepNet's alpha, here ``b.factor``."""
    Y = b.norm_1(b.factor * X + b.attention(X))
    return b.norm_2(b.factor * Y + b.feedforward(Y))


def admin(b: Any, X: Any) -> Any:
    """Post-Norm with the residual times a learnable vector omega."""
    Y = b.norm_1(X * b.omega_1 + b.attention(X))
    return b.norm_2(Y * b.omega_2 + b.feedforward(Y))


def sandwich(b: Any, X: Any) -> Any:
    """A norm before and after each branch."""
    Y = X + b.norm_3(b.attention(b.norm_1(X)))
    return Y + b.norm_4(b.feedforward(b.norm_2(Y)))


def branch_post(b: Any, X: Any) -> Any:
    """A norm after each branch, before the sum."""
    Y = X + b.norm_1(b.attention(X))
    return Y + b.norm_2(b.feedforward(Y))


def scaled_branches(b: Any, X: Any) -> Any:
    """Pre-Norm with each branch times a learnable lambda: a vector in LayerScale, a number in SkipInit."""
    Y = X + b.attention(b.norm_1(X)) * b.lambda_1
    return Y + b.feedforward(b.norm_2(Y)) * b.lambda_2
