"""The papers' figures, drawn anew: one small script each. ``python -m figures --list`` names them.

A script is a module of this package with a docstring, whose first line says what it shows, and a function
``draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]`` that returns the files it wrote, its pictures and
their numbers. Putting such a file here is all it takes. One that reads images or a text has ``images="digits"`` or
``text="stdlib"`` too, a source of :mod:`papers.experiments.images` or
:mod:`hessiankit.cli.text`. One that draws an experiment of ``python -m papers train`` has ``run=None``, the
folder of its runs. ``_kit.py`` has the look and the files, ``_trained.py`` and ``_digits.py`` the training runs, which are kept
below ``out/cache``, and ``_verdicts.py`` the verdicts on a paper's claims that a figure computes from what it draws.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path


def names() -> list[str]:
    """Return the names of all figures.

    >>> "curvature_gap_3_4" in names()
    True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def summary(name: str) -> str:
    """Return the first line of a figure's docstring, without running its imports.

    >>> summary("curvature_gap_3_4").startswith("Figures 3 and 4")
    True
    """
    source = (Path(__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def accepted(name: str) -> list[str]:
    """Return the options of a figure's ``draw`` besides the ones that all have, without running its imports.

    >>> accepted("curvature_gap_5"), accepted("route_table")
    (['images', 'run'], [])
    """
    tree = ast.parse((Path(__path__[0]) / f"{name}.py").read_text(encoding="utf-8"))
    (draw,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "draw")
    return [argument.arg for argument in draw.args.kwonlyargs if argument.arg not in ("quick", "suffix")]


def script(name: str) -> Callable[..., list[Path]]:
    """Return the ``draw`` function of a figure."""
    draw: Callable[..., list[Path]] = importlib.import_module(f"figures.{name}").draw
    return draw
