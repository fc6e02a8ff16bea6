"""One statement of a paper: where it stands, what was found of it, and the computation that finds it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from hessiankit.support.files import WithDict
from hessiankit.support.tables import as_text
from papers.autodiff import confirmations
from papers.digests import digests, unchanged

Verdict: TypeAlias = Literal[
    "HOLDS",
    "HOLDS UNDER ASSUMPTION",
    "WRONG AS PRINTED",
    "DOES NOT FOLLOW",
    "INCONSISTENT",
    "OMITTED",
    "LOOSE",
    "VAGUE",
    "SEEN AT THIS SIZE",
    "SAME DIRECTION, SMALLER",
    "SEEN IN PART",
    "NOT SEEN AT THIS SIZE",
    "OPEN",
    "NOT RUN",
]
"""Verdict of a row; ``papers.pages.MEANING`` defines each. SEEN ... and OPEN are what a small experiment, or a figure of the
gallery (``small_scale.json``), shows of a statement on larger models, which it neither confirms nor refutes."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

Severity: TypeAlias = Literal["slip of print", "constant", "scope", "false"]
"""Kind of a wrong print. Slip of print: the context, or another place of the paper, has what is meant. Constant: the form is
right, a factor or an exponent is not. Scope: it holds of less than it says. False: no reading of it holds."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Shows: TypeAlias = Literal[
    "agreement", "bound", "error", "violation", "condition", "looseness", "readings", "measurement", "figure", "nothing"
]
"""What a computation shows; see ``papers.evidence``."""

CONFIRMED = 1e-5
"""Of a derivative by autograd against central differences."""

SUPPORTED: dict[str, tuple[Shows, ...]] = {
    "HOLDS": ("agreement", "bound"),
    "HOLDS UNDER ASSUMPTION": ("condition",),
    "WRONG AS PRINTED": ("error", "violation"),
    "DOES NOT FOLLOW": ("error", "violation", "measurement"),
    "INCONSISTENT": ("error", "violation", "readings", "nothing"),
    "OMITTED": ("agreement", "bound", "error", "violation", "condition", "readings"),
    "LOOSE": ("looseness",),
    "VAGUE": ("readings",),
    "SEEN AT THIS SIZE": ("measurement", "agreement", "bound", "figure"),
    **dict.fromkeys(("SAME DIRECTION, SMALLER", "SEEN IN PART", "NOT SEEN AT THIS SIZE", "OPEN"), ("measurement", "figure")),
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
    "block-diagonal": Paper(
        "Is a transformer's Hessian block-diagonal?",
        "Dong et al. 2025 (arXiv:2505.02809), Abreu et al. 2025 (arXiv:2510.09378), Granziol and Juarev 2026 (arXiv:2602.00816)",
        "",
        "block_diagonal",
    ),
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
        arrays: What was compared, by name: of a wrong formula ``printed``, ``reference`` and ``corrected``.
        second: How a route that shares nothing with the reference confirms it; "" without one.
    """

    reproduced: bool
    number: float | None
    unit: str
    detail: str
    shows: Shows
    seed: int = 0
    arrays: Mapping[str, Any] = field(default_factory=dict)
    second: str = ""

    def __str__(self) -> str:
        digits = ".0f" if self.unit == "count" else ".3g"
        number = "" if self.number is None else f"{self.unit} {self.number:{digits}}"
        return f"{number}; {self.detail}" if number and self.detail else number or self.detail

    def printed_arrays(self) -> str:
        """Return what was compared, one array after another: whole where small, else shape and largest entry."""
        return "\n".join(_printed(name, value) for name, value in self.arrays.items())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python values; an array of more than 64 numbers by its shape and largest entry."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "arrays": {name: _plain(value) for name, value in self.arrays.items()}}


@dataclass(frozen=True, repr=False)
class Claim(WithDict):
    """A row of the ledger.

    Attributes:
        id: Stable name, "paper/place-and-part", e.g. "hybridnorm/eq28".
        place: Where it stands, e.g. "Theorem A.3, Eq. 28".
        statement: What it says: words, with LaTeX between dollars.
        verdict: What was found of it.
        compute: seed -> Evidence.
        corrected: The correct statement, or None.
        assumption: What it needs and the paper does not say (or says elsewhere), or None.
        sources: Functions of this code base that hold its closed form.
        chapter: Module of its row, without the package.
        severity: Kind of the error of a row that is WRONG AS PRINTED, else None.
        follows_from: Ids of the rows whose error this one inherits; a wrong row without them is a root cause.
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
    severity: Severity | None = None
    follows_from: tuple[str, ...] = ()

    _derived, _hidden = ("paper",), ("compute",)

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
            TypeError: The computation is not one that can support this verdict, or a wrong formula has no second route.
        """
        if self.verdict != "WRONG AS PRINTED":
            return self._as_read(self._compared(self._checked(self.compute(seed))), seed)
        with confirmations() as errors:
            found = self._checked(self.compute(seed))
        second = "; ".join([found.second] * bool(found.second) + ([_confirmed(errors)] if errors else []))
        if not second:
            raise TypeError(
                f"{self.id}: its verdict is WRONG AS PRINTED and one route gives the reference; expected second=..., or a "
                "derivative by papers.autodiff, which is compared with differences"
            )
        good = found.reproduced and max(errors, default=0.0) <= CONFIRMED
        return self._as_read(self._compared(replace(found, second=second, reproduced=good)), seed)

    def _compared(self, found: Evidence) -> Evidence:
        """Return the evidence with the verdict of ``hessiankit.identical``, at every point, on a row of ``papers.identities``."""
        from papers.identities import IDENTITIES, compared  # here, since SymPy is slow to import

        if self.id not in IDENTITIES:
            return found
        comparison = compared(self.id)
        second = f"{found.second}; {comparison}" if found.second else str(comparison)
        return replace(found, second=second, reproduced=found.reproduced and comparison.supports(self.verdict))

    def _as_read(self, found: Evidence, seed: int) -> Evidence:
        """Return the evidence with its seed; not reproduced where the printed side is not the one once read."""
        if seed or self.id not in digests() or unchanged(self.id, found.arrays):
            return replace(found, seed=seed)
        return replace(found, seed=seed, reproduced=False, detail=f"the printed side has changed; {found.detail}")

    def _checked(self, found: Evidence) -> Evidence:
        if found.shows not in SUPPORTED[self.verdict]:
            raise TypeError(
                f"{self.id}: its verdict is {self.verdict} and its computation shows {found.shows}; "
                f"expected one of {', '.join(SUPPORTED[self.verdict])}"
            )
        return found

    def __str__(self) -> str:
        parts = {
            "id": self.id,
            "place": f"{PAPERS[self.paper].title}, {self.place}",
            "statement": self.statement,
            "verdict": f"{self.verdict}, {self.severity}" if self.severity else self.verdict,
            "follows": ", ".join(self.follows_from),
            "needs": self.assumption,
            "correct": self.corrected,
            "code": ", ".join(self.sources),
        }
        return as_text(*(f"{name:<12}{text}" for name, text in parts.items() if text))

    def __repr__(self) -> str:
        return f"<Claim: {self.id}: {self.verdict}>"


def _confirmed(errors: list[float]) -> str:
    return f"{len(errors)} derivative{'s' * (len(errors) > 1)} by autograd against central differences, to {max(errors):.1g}"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        shown = value.detach()
        return shown.tolist() if shown.numel() <= 64 else {"shape": list(shown.shape), "largest": float(shown.abs().max())}
    return value


def _printed(name: str, value: Any) -> str:
    values = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, Tensor) and v.numel() != 1 for v in values):
        return "\n".join(_matrix(name if len(values) == 1 else f"{name} {k}", v) for k, v in enumerate(values, 1))
    numbers = ", ".join(f"{float(v):.6g}" if isinstance(v, int | float | Tensor) else str(v) for v in values[:12])
    return f"{name} = {numbers}{', ...' if len(values) > 12 else ''}"


def _matrix(name: str, value: Any) -> str:
    M = torch.as_tensor(value).detach()
    if not M.numel():
        return f"{name}: does not conform"
    rows = M.reshape(-1, M.shape[-1]) if M.ndim else M.reshape(1, 1)
    head = f"{name}, {' x '.join(map(str, M.shape))}, largest entry {float(M.abs().max()):.6g}"
    lines = ["  " + " ".join(f"{float(v):>10.4g}" for v in row[:8]) + (" ..." if len(row) > 8 else "") for row in rows[:8]]
    return "\n".join([head, *lines, *(["  ..."] if len(rows) > 8 else [])])
