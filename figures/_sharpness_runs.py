"""The two training runs that the figures of The Sharpness Disparity Principle read of, and the order that the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from figures._runs import ByteSpec
from figures._scales import scale_of
from figures._verdicts import unreached
from hessiankit.cli.text import VOCAB_SIZE
from hessiankit.training.sharpness import SharpnessReport

PRINTED = ("Emb", "QK", "FFN", "VO", "Norm")
"""Eq. (1), from flat to sharp."""

_GPT_2 = ByteSpec(
    "gpt2-like", layers=4, steps=1000, lr=4e-3, every=100, draws=8, batches=4,
    kept=(0, 10, 20, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900),
)  # fmt: skip
_LLAMA = replace(_GPT_2, name="llama-like", norm="rmsnorm", activation="swiglu", rotary=True, tied=False, d_ff=176)
_SMALLER = {"layers": 2, "d_model": 32, "heads": 2, "length": 32, "batch_size": 8, "steps": 60, "every": 20, "windows": 64}


def specs(quick: bool, text: str = "stdlib") -> dict[str, ByteSpec]:
    """Return the runs by title: GPT-2's block and Llama's, with the paper's optimiser at about a thousandth of its size.

    >>> [spec.tied for spec in specs(True).values()]
    [True, False]
    """
    both = {"GPT-2-like": replace(_GPT_2, text=text), "LLaMA-like": replace(_LLAMA, text=text)}
    if not quick:
        return both
    return {
        title: replace(spec, **{**_SMALLER, "d_ff": spec.d_ff and 88, "kept": (0, 20, 40), "batches": 2, "draws": 4})  # type: ignore[arg-type]
        for title, spec in both.items()
    }


def diluted(kind: str) -> str:
    """Return what a comparison with a type needs and these runs do not reach: the size of the vocabulary divides S(Emb).

    >>> diluted("Emb"), diluted("QK")
    ('vocabulary: 256 here, 50 304 in print', '')
    """
    return unreached(vocabulary=(VOCAB_SIZE, 50_304)) if kind == "Emb" else ""


def scale_of_both(both: Mapping[str, ByteSpec]) -> str:
    """Return the size of the runs in words, the parameters of each.

    >>> scale_of_both(specs(True))[:52]
    'GPT-2-like and LLaMA-like; 1 seed; 2 blocks of width'
    """
    return f"{' and '.join(both)}; {scale_of(next(iter(both.values())), 1)}"


@dataclass(frozen=True)
class Order:
    """What can be said of the printed order at one place.

    Attributes:
        seen: The types that the paper orders, from flat to sharp, as they are here.
        steps: For each ``<`` of the printed order, ``"yes"``, ``"no"``, or ``"open"`` where the interval of the quotient holds 1.
    """

    seen: tuple[str, ...]
    steps: tuple[str, ...]

    @property
    def printed(self) -> bool:
        """Whether the values, whatever their errors, stand in the printed order."""
        return self.seen == PRINTED


def order_of(report: SharpnessReport) -> Order:
    """Return what a report says of the printed order; quotients know that the same draws gave both of their parts."""
    seen = tuple(kind for kind in report.order if kind in PRINTED)
    quotients = [report.ratio(low, base=high) for low, high in pairwise(PRINTED)]
    return Order(seen, tuple("yes" if q.low > 1 else "no" if q.high < 1 else "open" for q in quotients))


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
