"""The gallery, docs/gallery.md: every picture of docs/, with the figure that draws it.

``python docs/_site/gallery.py`` makes the page anew. A picture ``NAME.png`` or ``NAME_anything.png`` belongs to the figure
``NAME`` of figures/, ``benchmarks_NAME.png`` to the benchmark ``NAME``; others are listed here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.suites import BENCHMARKS  # noqa: E402
from figures import names, summary  # noqa: E402

OTHERS = {
    "bounds": ("Bounds over true norms, by size, by training and by placement.", "python -m figures bounds_over_truth"),
    "hessian_cross_entropy": ("The Hessian of a digits classifier at initialisation and after training.", "hessiankit study"),
    "derivation_post": (
        "The post-norm block's second derivative in W_Q and W_V, typeset.",
        "python -m hessiankit.formulas.page docs",
    ),
    "derivation_hybridnorm": ("The same for HybridNorm.", "python -m hessiankit.formulas.page docs"),
    "monitoring": ("A training run, followed by a monitor.", "hessiankit monitor run.jsonl --plot run.png"),
    "learning_rates": ("Learning rates by block type, compared.", "hessiankit tune-lr"),
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


def page() -> str:
    """Return the gallery as Markdown."""
    lines = [
        "# Gallery",
        "",
        "Every picture of these pages and the command that draws it; `python -m figures --list` has all figures, `--quick` a",
        "small version of each, `--images PATH` draws from MNIST or CIFAR and `--text PATH` from a text where the default is",
        "scikit-learn's digits and Python's standard library. A figure writes its numbers beside its picture; a picture opens at",
        "full size. This page is made by `python docs/_site/gallery.py`.",
    ]
    for name, (shows, command, paths) in sorted(sections().items()):
        lines += ["", f"## {name}", ""]
        lines += [shows, "", "```bash", command, "```", ""] if command else []
        for path in paths:
            place = path.relative_to(ROOT / "docs").as_posix()
            lines.append(f"[![{name if len(paths) == 1 else path.stem}]({place})]({place})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "gallery.md").write_text(page(), encoding="utf-8")
