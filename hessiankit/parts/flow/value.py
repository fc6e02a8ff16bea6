"""What is known of one tensor of a run: what it is made of since the last multiplication by a weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

Ids: TypeAlias = frozenset[int]


class Rank(IntEnum):
    """What a tensor depends on: nothing, parameters, rows of parameters chosen by an index, the model's inputs."""

    CONSTANT = 0
    WEIGHT = 1
    CHOSEN = 2
    DATA = 3


@dataclass(frozen=True)
class Value:
    """What is known of one tensor.

    Attributes:
        rank: What it depends on.
        params: The parameters that it is made of, by name; empty for data.
        fed: The multiplications by weights that it comes from without another one between.
        products: The products of two activations that it comes from since the last multiplication by a weight.
        scores: Those of them that no softmax has followed.
        probs: The softmaxes of such scores that it comes from.
        context: The applications of attention whose output it is part of.
        direct: What made it, if it was only reshaped since: a multiplication by a weight, or a gain.
        deep: Whether a multiplication by a weight lies behind it at all.
    """

    rank: Rank = Rank.CONSTANT
    params: frozenset[str] = frozenset()
    fed: Ids = frozenset()
    products: Ids = frozenset()
    scores: Ids = frozenset()
    probs: Ids = frozenset()
    context: Ids = frozenset()
    direct: tuple[str, int] | None = None
    deep: bool = False

    @property
    def is_weight(self) -> bool:
        """Whether it is made of parameters, or rows of them, alone."""
        return self.rank in (Rank.WEIGHT, Rank.CHOSEN)


def joined(values: Iterable[Value]) -> Value:
    """Return what is known of a tensor computed from others, entry by entry or not.

    >>> joined([Value(Rank.DATA, fed=frozenset({1})), Value(Rank.DATA, fed=frozenset({2}))]).fed
    frozenset({1, 2})
    """
    given = list(values)
    if not given:
        return Value()
    rank = max(v.rank for v in given)
    both = {
        name: frozenset().union(*(getattr(v, name) for v in given)) for name in ("fed", "products", "scores", "probs", "context")
    }
    params = frozenset().union(*(v.params for v in given)) if rank < Rank.DATA else frozenset()
    direct = given[0].direct if len(given) == 1 else None
    return Value(rank, params, direct=direct, deep=any(v.deep for v in given), **both)


def added(left: Value, right: Value) -> Value:
    """Return what is known of a sum of two activations: attention's output is none any more where a residual comes in.

    >>> attention = Value(Rank.DATA, context=frozenset({3}))
    >>> added(attention, Value(Rank.DATA)).context, added(attention, attention).context
    (frozenset(), frozenset({3}))
    """
    found = joined((left, right))
    if left.context and right.context:
        return found
    return replace(found, context=frozenset())
