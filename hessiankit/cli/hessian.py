"""``hessiankit hessian`` on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessiankit.cli.parsing import (
    FAILED,
    INTERRUPTED,
    OK,
    Commands,
    add_block_options,
    add_command,
    add_json,
    add_problem,
    add_table,
)
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.support.files import write_json

if TYPE_CHECKING:
    from hessiankit.cli.module_options import Asked
    from hessiankit.curvature.dense import Hessian
    from hessiankit.curvature.forecast import Forecast

EXAMPLES = (
    ("hessiankit hessian --placement pre --heads 2 --plot hessian.png", "a pre-norm block of two heads, and its heat map"),
    (
        'hessiankit hessian --model tiny --params "blocks.0.attention.W_[QK]" --dry-run',
        "what a part of a language model's Hessian would take",
    ),
    (
        "hessiankit hessian --model my_models:make --shape 10 6 --loss mse --out hessian.npy",
        "your own model on ten drawn inputs of width 6; the matrix in a file",
    ),
)


def add_hessian(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "hessian",
        run_hessian,
        help="compute the exact Hessian of a transformer block, or of your own model",
        description="Compute the exact Hessian of a loss with respect to a model's parameters and print the norms of its "
        "diagonal blocks, parameter by parameter. The model is a transformer block that the options describe, on drawn "
        "inputs and targets; or, with --model, a language model on windows of a text, or any model on drawn inputs of a given "
        "--shape. Nothing is downloaded. Rows and columns of the matrix are in the table's order, each parameter row by row.",
        examples=EXAMPLES,
        failed="--dry-run, and it does not fit",
    )
    add = command.add_argument
    block = command.add_argument_group("the transformer block, without --model").add_argument
    add_problem(add, block)
    add("--dry-run", action="store_true", help="compute nothing; print what it would take in memory, disk and time")
    add("--out", type=Path, metavar="PATH", help="write the matrix to this .npy file, a part at a time is in memory")
    add("--overwrite", action="store_true", help="start again, whatever there is at --out")
    add("--plot", type=Path, metavar="PATH", help="draw the entries as a heat map, as .png, .svg or .pdf; the numbers beside it")
    add_json(add)
    add_table(add)
    add_block_options(block)


SUFFIXES = (".png", ".svg", ".pdf")


def run_hessian(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option, a model or a file cannot be used.
        OutOfMemoryError: If the inputs, what the model makes of them, or the matrix do not fit.
    """
    from hessiankit.cli.module_options import asked_of
    from hessiankit.curvature.dense import Hessian
    from hessiankit.curvature.forecast import Forecast
    from hessiankit.support.tables import say, show

    if args.plot is not None and args.plot.suffix not in SUFFIXES:
        raise InputError(f"hessian: cannot draw {args.plot}; name a file that ends in {', '.join(SUFFIXES)}")
    if args.plot is not None and args.dry_run:
        raise InputError("hessian: --plot needs the matrix, which --dry-run does not compute; drop one of them")
    asked = asked_of(args)
    say(str(asked))
    try:
        found = _found(args, asked)
    except KeyboardInterrupt:
        goes_on = f"; the same command goes on with what is in {args.out}.part" if args.out is not None else ""
        print(f"hessiankit: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{str(error).rstrip('.')}; --dry-run says what it takes") from error
    show(found, args.table)
    if args.out is not None and not args.dry_run:
        say(f"wrote {args.out}")
    if args.plot is not None and isinstance(found, Hessian):
        _draw(args, asked, found)
    if args.json is not None:
        write_json("hessian", args.json, _numbers(args, asked, found))
    return FAILED if isinstance(found, Forecast) and not found.fits else OK


def _found(args: argparse.Namespace, asked: Asked) -> Hessian | Forecast:
    from hessiankit.curvature.dense import hessian
    from hessiankit.support.progress import progress_bar

    given: dict[str, Any] = {"loss": asked.loss, "params": args.params, "out": args.out, "overwrite": args.overwrite}
    if args.dry_run:
        return hessian(asked.model, asked.inputs, asked.target, dry_run=True, **given)
    with progress_bar() as tell:
        given["progress"] = lambda done, total: tell("hessian", done, total)
        return hessian(asked.model, asked.inputs, asked.target, **given)


def _draw(args: argparse.Namespace, asked: Asked, found: Hessian) -> None:
    from hessiankit.curvature.plots import heatmap  # Matplotlib takes a second that others need not wait for
    from hessiankit.support.tables import say

    title = f"Hessian of {asked.name.partition(',')[0]}"
    heatmap(found.matrix, found.names, found.slices, title=title, path=args.plot)
    say(f"wrote {args.plot} and {args.plot.with_suffix('.csv')}")


def _numbers(args: argparse.Namespace, asked: Asked, found: Hessian | Forecast) -> dict[str, Any]:
    from hessiankit.curvature.forecast import Forecast
    from hessiankit.support.environment import environment

    return {
        **asked.to_dict(),
        "seed": args.seed,
        "out": args.out,
        "forecast" if isinstance(found, Forecast) else "hessian": found.to_dict(),
        "environment": environment(),
    }
