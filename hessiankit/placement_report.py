"""What the grid of norm placements found: a table in the terminal, a page and a compact JSON file.

The page and the file are docs/placement_grid.md and docs/placement_grid.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hessiankit.environment import environment
from hessiankit.files import write_text
from hessiankit.placement_cases import OPTIONS, cases
from hessiankit.placement_grid import AGAINST, RTOL, Finished, run_grid
from hessiankit.progress import progress_bar
from hessiankit.tables import say, table

NAMES = {
    "none": "no mask",
    "1": "1 head",
    "4": "4 heads",
    "4/2": "heads 4/2",
    1: "1 block",
    3: "3 blocks",
    "cross_entropy": "c. e.",
}
KEPT = ("date", "python", "torch", "processor", "cores", "system")


def worst(finished: Sequence[Finished]) -> float:
    """Return the largest error; NaN where one could not be compared."""
    errors = [f.error for f in finished]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def summary(finished: Sequence[Finished], command: str) -> dict[str, Any]:
    """Return counts, the worst error of every placement and option, what failed, and where the numbers come from."""
    placements: dict[str, list[Finished]] = {}
    for one in finished:
        placements.setdefault(one.case.placement, []).append(one)

    def by_option(own: Sequence[Finished]) -> dict[str, dict[str, float | None]]:
        split = {o: {str(v): [f for f in own if getattr(f.case, o) == v] for v in values} for o, values in OPTIONS.items()}
        return {o: {v: _number(worst(part)) if part else None for v, part in of.items()} for o, of in split.items()}

    return {
        "command": command,
        "environment": {key: value for key, value in environment().items() if key in KEPT},
        "code": sorted({f.version for f in finished}),
        "references": list(AGAINST),
        "tolerance": RTOL,
        "options": {option: list(values) for option, values in OPTIONS.items()},
        "cases": len(finished),
        "failed": [f"{f.case}: {f.verdict}" for f in finished if not f.passed],
        "max_rel_error": _number(worst(finished)),
        "identities": sum(f.identities for f in finished),
        "identity_error": max((f.identity_error for f in finished), default=0.0),
        "seconds": round(sum(f.seconds for f in finished), 1),
        "parameters": sorted({kind for f in finished for kind in f.kinds}),
        "placements": {
            name: {
                "cases": len(own),
                "failed": sum(not f.passed for f in own),
                "max_rel_error": _number(worst(own)),
                "identities": sum(f.identities for f in own),
                "identity_error": max(f.identity_error for f in own),
                "by": by_option(own),
            }
            for name, own in placements.items()
        },
    }


def _number(error: float) -> float | None:
    return None if math.isnan(error) else float(f"{error:.2e}")


def rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and one row a placement: cases, failures, worst error, worst error by option, identities."""
    values = [(option, str(value), NAMES.get(value, str(value))) for option, of in found["options"].items() for value in of]
    headers = ["placement", "cases", "failed", "worst", *(name for _, _, name in values), "identities", "worst"]

    def cells(name: str, own: dict[str, Any]) -> list[str]:
        errors = [_shown(own["by"][option][value]) for option, value, _ in values]
        counts = [str(own["cases"]), str(own["failed"]), _shown(own["max_rel_error"])]
        return [name, *counts, *errors, str(own["identities"]), _shown(own["identity_error"])]

    return headers, [cells(name, own) for name, own in found["placements"].items()]


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.0e}".replace("e-0", "e-")


def verdict(found: dict[str, Any]) -> str:
    """Return one line that says what was found."""
    failed = len(found["failed"])
    what = f"{failed} of {found['cases']} cases FAILED" if failed else f"PASSED: {found['cases']} cases"
    largest = "not known" if found["max_rel_error"] is None else f"{found['max_rel_error']:.1e}"
    return (
        f"{what} of {len(found['placements'])} placements; largest error {largest} of a block pair's largest entry (tolerance "
        f"{found['tolerance']:.0e}); {found['identities']} identities to {found['identity_error']:.1e}; {found['seconds']:.0f} s"
    )


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    headers, body = rows(found)
    place = found["environment"]
    origin = ", ".join([place["date"], *(f"{k} {place[k]}" for k in KEPT if k not in ("date", "torch")), *found["code"]])
    whole = len(cases())
    part = "" if found["cases"] == whole else f" These are {found['cases']} of the {whole} cases of the whole grid."
    lines = [
        "# Every norm placement, in every combination of options",
        "",
        "```bash",
        found["command"],
        "```",
        "",
        f"{verdict(found)}.{part}",
        "",
        f"{origin}.",
        "",
        "Each case is a language model (vocabulary 5, two sequences of three tokens, d_model 6, d_ff 5, heads three wide, eps "
        "0.1) with generic parameters: gains, biases and scales too, no ReLU near its kink, no row under a norm nearly constant, "
        "no gradient below 1/1000 of the largest. One block has biases everywhere and learned positions, three have neither; the "
        "head is tied to the embedding in half of the cases. `hessiankit.check` compares the exact Hessian with respect to all "
        f"parameters, block pair by block pair, along a generic direction a parameter, with {' and '.join(found['references'])}. "
        "Each number is the largest difference, relative to the largest entry of its own block pair, over the placement's cases "
        "with that option; the last two columns count the exact identities of the model's structure that were tested as well, "
        "and their largest error. Every case and option by number: [placement_grid.json](placement_grid.json).",
        "",
        "Parameters: " + ", ".join(f"`{kind}`" for kind in found["parameters"]) + ".",
        "",
        "| " + " | ".join(headers) + " |",
        "|---|" + "--:|" * (len(headers) - 1),
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    if found["failed"]:
        lines += ["", "Failed:", "", *(f"- {line}" for line in found["failed"])]
    return "\n".join(lines) + "\n"


def as_json(found: dict[str, Any]) -> str:
    """Return the summary as JSON, one line an entry and one a placement."""
    places = [f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in found["placements"].items()]
    entries = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items() if key != "placements"]
    return "{\n" + ",\n".join([*entries, ' "placements": {\n' + ",\n".join(places) + "\n }"]) + "\n}\n"


def run_placements(
    placements: list[str] | None, *, sample: int | None, seed: int, jobs: int, out: Path, command: str
) -> dict[str, Any]:
    """Run the grid or a part of it, print the table, write page and file, and return the summary that the file holds.

    Args:
        placements: Names, or None for all.
        sample: Number of cases to draw, or None for all.
        seed: Of the sample.
        jobs: Number of processes.
        out: Folder for ``cases.jsonl``, ``placement_grid.md`` and ``placement_grid.json``.
        command: What the page says it was made by.

    Raises:
        InputError: If a placement is not known or the folder cannot be used.
    """
    todo = cases(placements, sample=sample, seed=seed)
    with progress_bar() as tell:
        found = summary(run_grid(todo, out / "cases.jsonl", jobs=jobs, tell=tell), command)
    headers, body = rows(found)
    shown = table([*headers[:4], *headers[-2:]], [[*row[:4], *row[-2:]] for row in body], drop=("identities",))
    say(shown, *(f"FAILED {line}" for line in found["failed"]), verdict(found))
    write_text("check", out / "placement_grid.md", markdown(found))
    write_text("check", out / "placement_grid.json", as_json(found))
    return found
