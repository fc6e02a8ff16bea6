"""The gallery, docs/gallery.md: every picture of docs/, with the figure that draws it and its verdicts on a paper's claims.

``python docs/_site/gallery.py`` makes the page anew, and the ledger's file of what figures show of rows that are not run. A
picture ``NAME.png`` or ``NAME_anything.png`` belongs to the figure
``NAME`` of figures/, ``benchmarks_NAME.png`` to the benchmark ``NAME``; others are listed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.suites import BENCHMARKS  # noqa: E402
from figures import names, summary  # noqa: E402
from papers import PAPERS, claims  # noqa: E402
from papers.pages import markdown_text  # noqa: E402

GALLERY = ROOT / "docs" / "gallery"
SMALL_SCALE = ROOT / "papers" / "small_scale.json"
"""What the ledger reads of the figures."""
ENDING = "_verdicts"

OTHERS = {
    "bounds": ("Bounds over true norms, by size, by training and by placement.", "python -m figures bounds_over_truth"),
    "hessian_cross_entropy": (
        "The Hessian of a digits classifier at initialisation and after training: 3466 × 3466 entries in log scale, each pixel "
        "the largest of up to 23 × 23; grey: 0 to rounding.",
        "hessiankit study",
    ),
    "monitoring": ("A training run, followed by a monitor.", "hessiankit monitor run.jsonl --plot run.png"),
    "learning_rates": ("Learning rates by block type, compared.", "python -m papers tune-lr"),
} | {f"benchmarks_{name}": (benchmark.summary, f"python -m benchmarks {name}") for name, benchmark in BENCHMARKS.items()}
"""Stem of a picture -> what it shows, and the command that draws it."""


def pictures() -> list[Path]:
    """Return every picture of the pages."""
    return [path for suffix in ("png", "svg") for path in sorted((ROOT / "docs").rglob(f"*.{suffix}"))]


def figure_of(stem: str) -> str | None:
    """Return the figure that a picture belongs to: the one with the longest name that the picture's begins with."""
    found = [name for name in names() if stem == name or stem.startswith(f"{name}_")]
    return max(found, key=len, default=None)


def sections() -> dict[str, tuple[str, str, list[Path]]]:
    """Return, by figure or by picture, its summary, the command that draws it, and its pictures."""
    found: dict[str, tuple[str, str, list[Path]]] = {}
    for path in pictures():
        figure = figure_of(path.stem)
        if figure is None:
            shows, command = OTHERS.get(path.stem, ("", ""))
            found[path.stem] = shows, command, [path]
        else:
            found.setdefault(figure, (summary(figure), f"python -m figures {figure}", []))[2].append(path)
    return found


def verdicts() -> dict[str, list[dict[str, Any]]]:
    """Return, by figure, the verdicts that it wrote, in the form of ``figures._verdicts.Verdict.to_dict``."""
    found = {path.stem.removesuffix(ENDING): json.loads(path.read_text()) for path in sorted(GALLERY.glob(f"*{ENDING}.json"))}
    return {name: one for name, one in found.items() if one}


def small_scale() -> dict[str, dict[str, str]]:
    """Return what figures show of the ledger's rows that are not run: by row, the figure, the verdict, and one sentence."""
    rows = {row.id for row in claims() if row.chapter == "not_run"}
    found: dict[str, dict[str, str]] = {}
    for name, each in verdicts().items():
        for one in each:
            if one["claim"] in rows:  # of two figures, the first
                seen = f"{'; '.join(part['text'] for part in one['parts'])} ({one['scale']})"
                found.setdefault(one["claim"], {"figure": name, "verdict": one["status"], "seen": seen})
    return found


def group_of(name: str) -> str:
    """Return the heading that a figure belongs under: its paper's title, or one of two others."""
    paper = next((paper for key, paper in PAPERS.items() if name.startswith(key.replace("-", "_"))), None)
    if paper is not None:
        return paper.title
    return "Benchmarks" if name.startswith("benchmarks_") else "Curvature, bounds and derivations"


def section(name: str, shows: str, command: str, paths: Sequence[Path], said: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a figure: what it shows, its command, its pictures, and what they say of the paper's claims."""
    lines = ["", f"### {name}", "", *([shows, "", "```bash", command, "```", ""] if command else [])]
    for path in paths:
        place = path.relative_to(ROOT / "docs").as_posix()
        lines.append(f"[![{name if len(paths) == 1 else path.stem}]({place})]({place})")
    for one in said:
        place, statement = (markdown_text(text) for text in (one["place"], one["statement"]))
        lines += ["", f"- **{one['status'].capitalize()}**: {markdown_text(one['words'])} ({one['scale']})."]
        lines += [f"  {place}: {statement} (`{one['claim']}`). Criteria:"]
        lines += [f"    - {markdown_text(part['text'])}" for part in one["parts"]]
    return lines


def page() -> str:
    """Return the gallery as Markdown."""
    lines = [
        "# Gallery",
        "",
        "All pictures of these pages, with the commands that draw them. `python -m figures --list` lists the figures, and",
        "`--quick` draws a small version. Images are scikit-learn's digits and text is Python's standard library by default;",
        "`--images PATH` reads a `.npz` file, `--text PATH` a text. A figure writes its numbers beside its picture. Click a",
        "picture for its full size.",
        "",
        "A figure of a paper also says what it shows of the paper's claims, at its own small size. A criterion is met if",
        "every run meets it or the 95 % interval lies on its side, and not met if no run does or the interval lies on the",
        "other side. Where a criterion needs more than these runs have (steps, budget, vocabulary, width), failing leaves it",
        "open. The words under a picture follow: seen at this size; same direction, smaller; seen in part; not seen at this",
        "size; open. They are computed from the drawn numbers, and neither confirm nor refute a claim about a larger model.",
    ]
    found, said = sections(), verdicts()
    groups = [*(paper.title for paper in PAPERS.values()), "Curvature, bounds and derivations", "Benchmarks"]
    for group in groups:
        own = [name for name in sorted(found) if group_of(name) == group]
        lines += ["", f"## {group}"] if own else []
        for name in own:
            lines += section(name, *found[name], said.get(name, []))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "gallery.md").write_text(page(), encoding="utf-8")
    SMALL_SCALE.write_text(json.dumps(small_scale(), indent=1) + "\n", encoding="utf-8")
