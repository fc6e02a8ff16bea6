"""Compute the exact Hessian of a transformer block, or of your own model.

Compute the exact Hessian of a loss with respect to a model's parameters and print the norms of its diagonal blocks, parameter by
parameter. The model is a transformer block that the options describe, on drawn inputs and targets; or, with --model, a language
model on windows of a text, or any model on drawn inputs of a given --shape. Nothing is downloaded. Rows and columns of the matrix
are in the table's order, each parameter row by row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hessiankit.cli.parsing import INTERRUPTED, Parser, add_output, add_problem, check_problem, finish, refuse
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.support.files import check_writable
from hessiankit.support.tables import say

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
FAILS = "--dry-run, and it does not fit"
SUFFIXES = (".png", ".svg", ".pdf")


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add_problem(command, "the transformer block, without --model")
    add("--dry-run", action="store_true", help="compute nothing; print what it would take in memory, disk and time")
    add("--out", type=Path, metavar="PATH", help="write the matrix to this .npy file, a part at a time is in memory")
    add("--overwrite", action="store_true", help="replace the file at --out")
    add("--resume", action="store_true", help="keep the finished rows of the file at --out, if they are those of this Hessian")
    add("--plot", type=Path, metavar="PATH", help="draw the entries as a heat map, as .png, .svg or .pdf; the numbers beside it")
    add_output(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.plot is not None and args.plot.suffix not in SUFFIXES:
        raise InputError(f"hessian: cannot draw {args.plot}; name a file that ends in {', '.join(SUFFIXES)}")
    if args.plot is not None and args.dry_run:
        raise InputError("hessian: --plot needs the matrix, which --dry-run does not compute; drop one of them")
    if args.out is None:
        refuse(args, ("overwrite", "resume"), "is of a file; add --out")
    check_writable("hessian", args.out)
    check_problem(args)

    from hessiankit.cli.module_options import asked_of
    from hessiankit.curvature.dense import Hessian, hessian
    from hessiankit.curvature.forecast import Forecast
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar

    asked = asked_of(args)
    say(str(asked))
    options = {"loss": asked.loss, "params": args.params, "out": args.out, "overwrite": args.overwrite, "resume": args.resume}
    try:
        with progress_bar() as tell:
            options |= {"dry_run": True} if args.dry_run else {"progress": lambda done, total: tell("hessian", done, total)}
            result = hessian(asked.model, asked.inputs, asked.target, **options)
    except KeyboardInterrupt:
        resumable = f"; --resume continues {args.out}" if args.out is not None and args.out.exists() else ""
        print(f"hessiankit: interrupted{resumable}", file=sys.stderr)
        return INTERRUPTED
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{str(error).rstrip('.')}; --dry-run says what it takes") from error
    kind = "forecast" if isinstance(result, Forecast) else "hessian"
    own = {"seed": args.seed, "out": args.out, kind: result, "environment": environment()}
    finish(args, result, {**asked.to_dict(), **own})
    if args.out is not None and not args.dry_run:
        say(f"wrote {args.out}")
    if args.plot is not None and isinstance(result, Hessian):
        picture = result.plot(args.plot, title=f"Hessian of {asked.name.partition(',')[0]}")
        say(f"wrote {args.plot} and {args.plot.with_suffix('.csv')}: {picture.caption}")
    return int(isinstance(result, Forecast) and not result.fits)
