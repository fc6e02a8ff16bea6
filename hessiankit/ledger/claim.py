"""One statement of a paper: where it stands, what was found of it, and the computation that finds it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from hessiankit.support.tables import as_text

Verdict: TypeAlias = Literal[
    "HOLDS",
    "HOLDS UNDER ASSUMPTION",
    "WRONG AS PRINTED",
    "OMITTED",
    "LOOSE",
    "VAGUE",
    "REPRODUCED",
    "NOT REPRODUCED",
    "NOT RUN",
]
"""OMITTED: the paper needs it and does not state it. NOT RUN: it takes training at a size that this code does not run."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

Shows: TypeAlias = Literal[
    "agreement", "bound", "error", "violation", "condition", "looseness", "readings", "measurement", "nothing"
]
"""What a computation shows; see ``hessiankit.ledger.evidence``."""

SUPPORTED: dict[str, tuple[Shows, ...]] = {
    "HOLDS": ("agreement", "bound"),
    "HOLDS UNDER ASSUMPTION": ("condition",),
    "WRONG AS PRINTED": ("error", "violation"),
    "OMITTED": ("agreement", "bound", "error", "condition"),
    "LOOSE": ("looseness",),
    "VAGUE": ("readings",),
    "REPRODUCED": ("measurement", "agreement", "bound"),
    "NOT REPRODUCED": ("measurement", "error", "violation"),
    "NOT RUN": ("nothing",),
}
"""Which computations can support a verdict: a row that says HOLDS and measures an error above a threshold is refused."""


class Paper(NamedTuple):
    """One of the papers whose statements are in the ledger."""

    title: str
    authors: str
    arxiv: str
    package: str


PAPERS: dict[str, Paper] = {
    "curvature-gap": Paper("Closing the Curvature Gap: Full Transformer Hessians", "Petrov et al.", "", "curvature_gap"),
    "sharpness-disparity": Paper(
        "The Sharpness Disparity Principle in Transformers", "Wang et al. 2025", "2502.19002", "sharpness_disparity"
    ),
    "curse-of-depth": Paper("The Curse of Depth in Large Language Models", "Sun et al. 2025", "2502.05795", "curse_of_depth"),
    "hybridnorm": Paper("HybridNorm", "Zhuo et al. 2025", "2503.04598", "hybridnorm"),
    "ours": Paper("Statements of this code base", "", "", "ours"),
}
"""By the first part of the ids of their rows."""


@dataclass(frozen=True)
class Evidence:
    """What the computation of a row found.

    Attributes:
        reproduced: Whether the verdict was found again.
        number: The deciding number, or None where there is none.
        unit: What it is: "relative error", "violation ratio", "count" or "value"; "" without a number.
        detail: What was computed, in one line.
        shows: What it shows, one of ``Shows``.
        seed: What the random numbers were drawn from.
    """

    reproduced: bool
    number: float | None
    unit: str
    detail: str
    shows: Shows
    seed: int = 0

    def __str__(self) -> str:
        digits = ".0f" if self.unit == "count" else ".3g"
        number = "" if self.number is None else f"{self.unit} {self.number:{digits}}"
        return f"{number}; {self.detail}" if number and self.detail else number or self.detail


@dataclass(frozen=True, repr=False)
class Claim:
    """A row of the ledger.

    Attributes:
        id: Stable name, "paper/place-and-part", e.g. "hybridnorm/eq28".
        place: Where it stands, e.g. "Theorem A.3, Eq. 28".
        statement: What it says: words, with LaTeX between dollars.
        verdict: What was found of it.
        compute: seed -> Evidence.
        corrected: What is true in its place, or None.
        assumption: What it needs and the paper does not say (or says elsewhere), or None.
        sources: Functions of this code base that hold its closed form.
        chapter: Module of its row, without the package.
    """

    id: str
    place: str
    statement: str
    verdict: Verdict
    compute: Callable[[int], Evidence]
    corrected: str | None = None
    assumption: str | None = None
    sources: tuple[str, ...] = ()
    chapter: str = ""

    @property
    def paper(self) -> str:
        """The first part of the id, a key of ``PAPERS``."""
        return self.id.split("/")[0]

    @property
    def anchor(self) -> str:
        """The id as a link target of the page in docs."""
        return self.id.replace("/", "-")

    def evidence(self, seed: int = 0) -> Evidence:
        """Compute again what the verdict rests on.

        Raises:
            TypeError: The computation is not one that can support this verdict.
        """
        found = self.compute(seed)
        if found.shows not in SUPPORTED[self.verdict]:
            raise TypeError(
                f"{self.id}: its verdict is {self.verdict} and its computation shows {found.shows}; "
                f"expected one of {', '.join(SUPPORTED[self.verdict])}"
            )
        return replace(found, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain Python values, without the computation."""
        values = asdict(replace(self, compute=_no_computation))
        del values["compute"]
        return {"paper": self.paper, **values}

    def __str__(self) -> str:
        parts = {
            "id": self.id,
            "place": f"{PAPERS[self.paper].title}, {self.place}",
            "statement": self.statement,
            "verdict": self.verdict,
            "assumption": self.assumption,
            "corrected": self.corrected,
            "code": ", ".join(self.sources),
        }
        return as_text(*(f"{name:<12}{text}" for name, text in parts.items() if text))

    def __repr__(self) -> str:
        return f"<Claim: {self.id}: {self.verdict}>"


def _no_computation(seed: int) -> Evidence:
    raise NotImplementedError
