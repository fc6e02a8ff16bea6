"""A script in percent format and its notebook: how one is made of the other, and whether they still agree."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
LANGUAGE = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """Return the scripts that have, or should have, a notebook beside them."""
    return sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))


def notebook_of(script: Path) -> NotebookNode:
    """Return the notebook of a script, without outputs; the same text gives the same notebook, cell names included."""
    notebook = jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent")
    cells = [
        {**cell, "id": f"cell-{k}", "metadata": {}, "source": cell.source.strip("\n")} for k, cell in enumerate(notebook.cells, 1)
    ]
    return nbformat.from_dict({"cells": cells, "metadata": LANGUAGE, "nbformat": 4, "nbformat_minor": 5})


def drift(script: Path) -> str | None:
    """Return how the notebook beside a script differs from it in its cells, or None where they agree."""
    path = script.with_suffix(".ipynb")
    if not path.exists():
        return f"{path.name} is missing"
    pairs = zip_longest(notebook_of(script).cells, nbformat.read(path, as_version=4).cells)
    for k, (expected, found) in enumerate(pairs, 1):
        if expected is None or found is None:
            return f"{path.name} has {'more' if expected is None else 'fewer'} cells than {script.name}, from cell {k} on"
        if (expected.cell_type, expected.source) != (found.cell_type, found.source):
            return f"cell {k} of {path.name} is not that of {script.name}: {_first_difference(expected.source, found.source)}"
    return None


def _first_difference(expected: str, found: str) -> str:
    lines = zip_longest(expected.splitlines(), found.splitlines(), fillvalue="")
    return next((f"{b!r} in place of {a!r}" for a, b in lines if a != b), "it is of another type")
