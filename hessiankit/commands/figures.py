"""``hessiankit figures``: the same as ``python -m figures``, from where the figures' scripts are."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import hessiankit
from hessiankit.commands.parsing import Add, Commands, add_command, add_json
from hessiankit.errors import InputError

EXAMPLES = (
    ("hessiankit figures --list", "their names, and what each shows"),
    ("hessiankit figures curvature_gap_3_4 --quick", "one figure, a small model; pictures and numbers in build/figures"),
    ("hessiankit figures --all --format svg --out pictures", "all of them; after Ctrl-C the same command goes on"),
)


def add_figures(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "figures",
        runner="hessiankit.commands.figures:run_figures",
        help="draw the papers' figures anew (in a clone of the repository)",
        description="Draw the papers' figures anew, each with its numbers as CSV or JSON beside it; as python -m figures. The "
        "scripts are in the repository's folder figures, not in the installed package. Training runs are kept below OUT/cache.",
        examples=EXAMPLES,
        failed="some figures failed, and are named; the others are drawn",
    )
    add_figure_options(command.add_argument)


def add_figure_options(add: Add) -> None:
    """Add the options."""
    add("name", nargs="*", help="figures to draw")
    add("--list", action="store_true", help="name the figures and say what they show")
    add("--all", action="store_true", help="draw every figure")
    add("--quick", action="store_true", help="a smaller model and fewer steps: seconds instead of minutes")
    add("--out", type=Path, default=Path("build/figures"), help="folder to write to (default: %(default)s)")
    add("--format", choices=("png", "svg", "pdf"), default="png", help="format of the pictures (default: %(default)s)")
    add(
        "--images",
        metavar="PATH",
        help="MNIST or CIFAR on this machine, for the figures of images (default: scikit-learn's digits)",
    )
    add("--text", metavar="PATH", help="a file or a folder, for the figures of text (default: Python's standard library)")
    add_json(add)


def run_figures(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If the scripts are not there, or an option cannot be used.
    """
    root = _root()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    run: int = import_module("figures.__main__").run(args)
    return run


def _root() -> Path:
    """Return the clone's folder: the one that this package lies in, or the current one."""
    for root in (Path(hessiankit.__file__).parents[1], Path.cwd()):
        if all((root / package / "__main__.py").is_file() for package in ("figures", "hessiankit")):
            return root
    raise InputError(
        "figures: the scripts are not here: they come with a clone of the repository, not with the installed package; run the "
        "command in the clone's folder"
    )
