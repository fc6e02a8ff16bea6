"""Verdicts on a paper's claims at the scale of a figure, computed from the drawn numbers by a stated criterion.

A claim is a row of the ledger. A :class:`Verdict` on it has one :class:`Part` for each thing that it says; a part's status
follows from the outcomes of the runs (:func:`in_every`) or from an interval (:func:`above_zero`), never from a sentence.
``figures._kit.save`` prints the verdicts under the picture, ``figures._kit.write_verdicts`` writes them beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from hessiankit.support.errors import InputError
from papers import PAPERS, Claim, claims
from papers.experiments.tuning.verdict import Interval

Status: TypeAlias = Literal["SUPPORTED", "CONTRADICTED", "OPEN"]
COLOURS = {"SUPPORTED": "#00664a", "CONTRADICTED": "#b04a00", "OPEN": "#404040"}
SIZE, LINE = 8.0, 0.155
"""Font size in points and height of a line in inches."""


@dataclass(frozen=True)
class Part:
    """One thing that a claim says.

    Attributes:
        criterion: What has to be seen, and where.
        status: What was seen of it.
        seen: The numbers that decide.
    """

    criterion: str
    status: Status
    seen: str


@dataclass(frozen=True)
class Verdict:
    """What a figure shows of a claim; the strictest status of its parts.

    Attributes:
        claim: Id of the ledger's row; "" for a claim that no paper makes.
        scale: Seeds, size of the model and of the data.
        parts: What the claim says, part by part.
    """

    claim: str
    scale: str
    parts: tuple[Part, ...]

    @property
    def status(self) -> Status:
        """CONTRADICTED if a part is, SUPPORTED if all parts are, OPEN otherwise.

        >>> Verdict("hybridnorm/fig4", "", (in_every("a", [True], ""), in_every("b", [True, False], ""))).status
        'OPEN'
        """
        found = {part.status for part in self.parts}
        return "CONTRADICTED" if "CONTRADICTED" in found else "OPEN" if "OPEN" in found or not found else "SUPPORTED"

    @property
    def row(self) -> Claim:
        """The ledger's row.

        Raises:
            InputError: It has none of this id.
        """
        return claims(id=self.claim)[0]

    @property
    def text(self) -> str:
        """One paragraph: where the claim is printed, the criteria, and what was seen.

        >>> Verdict("hybridnorm/fig4", "", (in_every("lower loss", [False], "2.1"),)).text
        'HybridNorm, Fig. 4, Sec. 4.4: lower loss: no, 2.1'
        """
        word = {"SUPPORTED": "yes", "CONTRADICTED": "no", "OPEN": "undecided"}
        said = "; ".join(f"{part.criterion}: {word[part.status]}, {part.seen}" for part in self.parts)
        return f"{title(self.claim)}, {self.row.place}: {said}" if self.claim else said

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values, with the statement as the ledger has it."""
        parts = [vars(part) for part in self.parts]
        said = {"place": self.row.place, "statement": self.row.statement}
        return {"claim": self.claim, **said, "status": self.status, "scale": self.scale, "parts": parts}


def title(claim: str) -> str:
    """Return the title of a claim's paper, up to its colon or its "in".

    >>> title("curse-of-depth/fig3"), title("curvature-gap/fig5")
    ('The Curse of Depth', 'Closing the Curvature Gap')
    """
    return PAPERS[claim.split("/")[0]].title.partition(":")[0].partition(" in ")[0]


def in_every(criterion: str, outcomes: Iterable[bool | None], seen: str) -> Part:
    """Return SUPPORTED where every run meets the criterion, CONTRADICTED where every run fails it, OPEN otherwise.

    Args:
        criterion: What has to be seen.
        outcomes: One a run; None where its error does not decide.
        seen: The numbers that decide.

    Raises:
        InputError: There is no run.

    >>> [in_every("", outcomes, "").status for outcomes in ([True, True], [True, False], [False], [False, None])]
    ['SUPPORTED', 'OPEN', 'CONTRADICTED', 'OPEN']
    """
    found = list(outcomes)
    if not found:
        raise InputError(f"in_every: no run for the criterion {criterion!r}; give one outcome or more")
    failed = all(outcome is not None and not outcome for outcome in found)
    return Part(criterion, "SUPPORTED" if all(found) else "CONTRADICTED" if failed else "OPEN", seen)


def above_zero(criterion: str, intervals: Interval | Sequence[Interval], seen: str = "") -> Part:
    """Return SUPPORTED where all 95 % intervals are above 0, CONTRADICTED where one is below, else OPEN.

    Args:
        criterion: What is positive if the claim holds.
        intervals: Of the differences.
        seen: By default the intervals.

    >>> above_zero("gain", Interval(1.0, 0.5, 1.5, 3, 0.95))
    Part(criterion='gain', status='SUPPORTED', seen='1.000 [0.500, 1.500]')
    """
    each = [intervals] if isinstance(intervals, Interval) else list(intervals)
    status: Status = "OPEN"
    if each and all(one.low > 0 for one in each):
        status = "SUPPORTED"
    elif any(one.high < 0 for one in each):
        status = "CONTRADICTED"
    return Part(criterion, status, seen or ", ".join(map(str, each)))


def negative(one: Interval) -> Interval:
    """Return the interval of a mean with its sign turned.

    >>> print(negative(Interval(1.0, 0.5, 2.0, 3, 0.95)))
    -1.000 [-2.000, -0.500]
    """
    return replace(one, value=-one.value, low=-one.high, high=-one.low)


def print_below(figure: Figure, verdicts: Sequence[Verdict]) -> Bbox:
    """Write the verdicts under a figure, a line each, and return what is to be saved of it, in inches: the figure and the lines.

    Criteria, numbers and scale are in the figure's JSON and in the text of the pages.
    """
    width, height = figure.get_size_inches()
    y = 0.06
    for verdict in verdicts:
        at: Any = {"y": -y / height, "fontsize": SIZE, "va": "top"}
        figure.text(0.12 / width, s=verdict.status, color=COLOURS[verdict.status], fontweight="bold", **at)
        where = f"{title(verdict.claim)}, {verdict.row.place} ({verdict.claim})" if verdict.claim else verdict.parts[0].criterion
        figure.text(1.32 / width, s=where, **at)
        y += LINE
    return Bbox(((0.0, -y - 0.06), (width, height)))
