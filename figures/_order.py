"""The order of the block types that The Sharpness Disparity Principle prints, and what runs show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from figures._verdicts import unreached
from papers.experiments.spec import Spec, scale_of

PRINTED = ("Emb", "QK", "FFN", "VO", "Norm")
"""Eq. (1), from flat to sharp."""


def diluted(kind: str, spec: Spec) -> str:
    """Return what a comparison with a type needs and a run does not reach: the size of the vocabulary divides S(Emb).

    >>> diluted("Emb", Spec("bytes")), diluted("QK", Spec("bytes")), diluted("Emb", Spec("GPT-2", vocabulary=50_304))
    ('vocabulary: 256 here, 50 304 in print', '', '')
    """
    return unreached(vocabulary=(spec.vocabulary, 50_304)) if kind == "Emb" else ""


def scale_of_both(both: Mapping[str, Spec]) -> str:
    """Return the size of the runs in words, the parameters of each.

    >>> scale_of_both({"A": Spec("a", d_model=8, heads=2), "B": Spec("b")})[:34]
    'A and B; 1 seed; 3 blocks of width'
    """
    return f"{' and '.join(both)}; {scale_of(next(iter(both.values())), 1)}"


def order_by_values(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the types that the paper orders, from flat to sharp.

    >>> order_by_values({"Norm": 3.0, "Emb": 1.0, "Head": 2.0})
    ('Emb', 'Norm')
    """
    return tuple(sorted((kind for kind in values if kind in PRINTED), key=values.__getitem__))


def agreements(orders: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return for each step of the printed order in how many of some orders it is seen.

    >>> agreements([("QK", "FFN", "VO", "Emb", "Norm")])
    {'Emb < QK': 0, 'QK < FFN': 1, 'FFN < VO': 1, 'VO < Norm': 1}
    """
    pairs = list(pairwise(PRINTED))
    return {f"{a} < {b}": sum(list(one).index(a) < list(one).index(b) for one in orders) for a, b in pairs}
