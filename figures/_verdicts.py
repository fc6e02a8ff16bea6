"""What a figure shows of a paper's claims, at the figure's own size: criteria, what was seen, and the words under the picture.

A criterion names what has to be seen. Where the paper, or a row of the ledger, says what it depends on (steps, budget,
vocabulary, width), a run that does not reach this leaves it open: it can show the claim and cannot speak against it. The
strongest word against a claim is that it is not seen at this size. The page of the gallery and the ledger read the verdicts from
the JSON that :func:`figures._kit.write_verdicts` writes beside the picture.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from hessiankit.support.errors import InputError
from papers import PAPERS, Claim, claims
from papers.experiments.tuning.verdict import Interval

Status: TypeAlias = Literal["SEEN AT THIS SIZE", "SAME DIRECTION, SMALLER", "SEEN IN PART", "NOT SEEN AT THIS SIZE", "OPEN"]
SEEN: Status = "SEEN AT THIS SIZE"
SMALLER: Status = "SAME DIRECTION, SMALLER"
IN_PART: Status = "SEEN IN PART"
NOT_SEEN: Status = "NOT SEEN AT THIS SIZE"
OPEN: Status = "OPEN"
ANSWER = {SEEN: "yes", SMALLER: "smaller", NOT_SEEN: "no", OPEN: "undecided"}
"""Answer to a criterion, in one word."""
COLOURS = {SEEN: "#00664a", SMALLER: "#00664a"}
"""Colour of a verdict's text; the others have that of all text."""
SIZE, LINE, GAP, LETTERS = 8.0, 0.155, 0.04, 17.5
"""Font size in points, height of a line and of the room behind a verdict in inches (whole pixels), and letters of an inch."""


@dataclass(frozen=True)
class Part:
    """One thing that a claim says.

    Attributes:
        criterion: What has to be seen, and where.
        status: What was seen of it.
        seen: The numbers that decide.
        unreached: What the criterion needs and the runs do not reach; "" where they do.
    """

    criterion: str
    status: Status
    seen: str
    unreached: str = ""

    @property
    def text(self) -> str:
        """Criterion, answer and numbers.

        >>> in_every("LNS is lower", [False], "2.3", unreached(steps=(400, 10_000))).text
        'LNS is lower: not reached at this size, steps: 400 here, 10 000 in print (2.3)'
        """
        answer = f"not reached at this size, {self.unreached}" if self.unreached else ANSWER[self.status]
        return f"{self.criterion}: {answer} ({self.seen})"


@dataclass(frozen=True)
class Verdict:
    """What a figure shows of a claim.

    Attributes:
        claim: Id of the ledger's row; "" for a claim that no paper makes.
        words: The claim in words, without formulas.
        scale: Seeds, size of the model and of the data.
        parts: What the claim says, part by part.
    """

    claim: str
    words: str
    scale: str
    parts: tuple[Part, ...]

    @property
    def status(self) -> Status:
        """The status that all parts share, or of their mixture.

        >>> Verdict("hybridnorm/fig4", "", "", (in_every("a", [True], ""), in_every("b", [True, False], ""))).status
        'SEEN IN PART'
        """
        found = {part.status for part in self.parts}
        if found and found <= {SEEN, SMALLER}:
            return SMALLER if SMALLER in found else SEEN
        if found & {SEEN, SMALLER}:
            return IN_PART
        return NOT_SEEN if NOT_SEEN in found else OPEN

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

        >>> Verdict("hybridnorm/fig4", "", "", (in_every("lower loss", [False], "2.1"),)).text
        'HybridNorm, Fig. 4, Sec. 4.4: lower loss: no (2.1)'
        """
        said = "; ".join(part.text for part in self.parts)
        return f"{title(self.claim)}, {self.row.place}: {said}" if self.claim else said

    @property
    def caption(self) -> str:
        """The words under a picture: the claim, where it is printed, what was seen, and the size.

        >>> Verdict("hybridnorm/fig4", "a special first block lowers the loss", "4 seeds", ()).caption
        'HybridNorm, Fig. 4, Sec. 4.4: a special first block lowers the loss. Open. 4 seeds.'
        """
        where = f"{title(self.claim)}, {self.row.place}: " if self.claim else ""
        missing = ", ".join(dict.fromkeys(part.unreached for part in self.parts if part.unreached))
        seen = f"{self.status.capitalize()} ({missing})" if missing else self.status.capitalize()
        return f"{where}{self.words}. {seen}. {self.scale}."

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values, with the statement as the ledger has it."""
        parts = [{**vars(part), "text": part.text} for part in self.parts]
        said = {"place": self.row.place, "statement": self.row.statement, "words": self.words}
        return {"claim": self.claim, **said, "status": self.status, "scale": self.scale, "parts": parts}


def title(claim: str) -> str:
    """Return the title of a claim's paper, up to its colon or its "in".

    >>> title("curse-of-depth/fig3"), title("curvature-gap/fig5")
    ('The Curse of Depth', 'Closing the Curvature Gap')
    """
    return PAPERS[claim.split("/")[0]].title.partition(":")[0].partition(" in ")[0]


def unreached(**needs: tuple[float, float]) -> str:
    """Return which of the paper's conditions the runs do not reach: by name, the number here and the one in print; "" for none.

    >>> unreached(steps=(400, 10_000), vocabulary=(60_000, 50_304))
    'steps: 400 here, 10 000 in print'
    """
    short = {name.replace("_", " "): pair for name, pair in needs.items() if pair[0] < pair[1]}
    return ", ".join(f"{name}: {_grouped(here)} here, {_grouped(printed)} in print" for name, (here, printed) in short.items())


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ") if number >= 1000 else f"{number:.3g}"


def in_every(
    criterion: str, outcomes: Iterable[bool | None], seen: str, missing: str = "", *, direction: Iterable[bool] = ()
) -> Part:
    """Return SEEN where every run meets the criterion, NOT SEEN where every run fails it, OPEN otherwise.

    Args:
        criterion: What has to be seen.
        outcomes: One a run; None where its error does not decide.
        seen: The numbers that decide.
        missing: What :func:`unreached` returned: with it runs that fail leave the criterion open.
        direction: One a run, whether the effect has the paper's sign: where all have, runs that fail are SMALLER.

    Raises:
        InputError: There is no run.

    >>> [in_every("", outcomes, "").status for outcomes in ([True, True], [True, False], [False], [False, None])]
    ['SEEN AT THIS SIZE', 'OPEN', 'NOT SEEN AT THIS SIZE', 'OPEN']
    >>> in_every("above 7 times", [False], "3 times", direction=[True]).status
    'SAME DIRECTION, SMALLER'
    """
    found, same = list(outcomes), list(direction)
    if not found:
        raise InputError(f"in_every: no run for the criterion {criterion!r}; give one outcome or more")
    if all(found):
        return Part(criterion, SEEN, seen)
    if same and all(same):
        return Part(criterion, SMALLER, seen)
    failed = all(outcome is not None and not outcome for outcome in found)
    return Part(criterion, NOT_SEEN if failed and not missing else OPEN, seen, missing)


def above_zero(criterion: str, intervals: Interval | Sequence[Interval], seen: str = "", missing: str = "") -> Part:
    """Return SEEN where all 95 % intervals are above 0, NOT SEEN where one is below, else OPEN.

    Args:
        criterion: What is positive if the claim holds.
        intervals: Of the differences.
        seen: By default the intervals.
        missing: As for :func:`in_every`.

    >>> above_zero("gain", Interval(1.0, 0.5, 1.5, 3, 0.95))
    Part(criterion='gain', status='SEEN AT THIS SIZE', seen='1.000 [0.500, 1.500]', unreached='')
    """
    each = [intervals] if isinstance(intervals, Interval) else list(intervals)
    seen = seen or ", ".join(map(str, each))
    if each and all(one.low > 0 for one in each):
        return Part(criterion, SEEN, seen)
    below = any(one.high < 0 for one in each)
    return Part(criterion, NOT_SEEN if below and not missing else OPEN, seen, missing)


def negative(one: Interval) -> Interval:
    """Return the interval of a mean with its sign turned.

    >>> print(negative(Interval(1.0, 0.5, 2.0, 3, 0.95)))
    -1.000 [-2.000, -0.500]
    """
    return replace(one, value=-one.value, low=-one.high, high=-one.low)


def print_below(figure: Figure, verdicts: Sequence[Verdict]) -> Bbox:
    """Write the verdicts under a figure, and return what is to be saved of it, in inches: the figure and the lines.

    Criteria and numbers are in the figure's JSON and in the text of the pages.
    """
    width, height = figure.get_size_inches()
    y = 0.06
    for verdict in verdicts:
        colour = COLOURS.get(verdict.status, "#404040")
        words = re.sub(r"(?<=\d) (?=\d{3}\b)", "\u00a0", verdict.caption)  # keeps 10 000 in one line
        for k, line in enumerate(textwrap.wrap(words, int(LETTERS * (width - 0.4)))):
            x = (0.26 if k else 0.12) / width  # later lines are indented
            figure.text(x, -y / height, line, fontsize=SIZE, va="top", color=colour, parse_math=False)
            y += LINE
        y += GAP
    return Bbox(((0.0, -y - 0.06), (width, height)))
