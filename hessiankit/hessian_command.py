"""``hessiankit hessian``: the exact Hessian of a block or of a model, printed, written, drawn."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hessiankit.commands.exit_codes import FAILED, INTERRUPTED, OK
from hessiankit.curvature import Hessian, hessian
from hessiankit.disk.forecast import Forecast
from hessiankit.environment import environment
from hessiankit.errors import InputError, OutOfMemoryError
from hessiankit.files import write_json
from hessiankit.module_options import Asked, asked_of
from hessiankit.progress import progress_bar
from hessiankit.tables import say, show

SUFFIXES = (".png", ".svg", ".pdf")


def run_hessian(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option, a model or a file cannot be used.
        OutOfMemoryError: If the inputs, what the model makes of them, or the matrix do not fit.
    """
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
    given: dict[str, Any] = {"loss": asked.loss, "params": args.params, "out": args.out, "overwrite": args.overwrite}
    if args.dry_run:
        forecast: Forecast = hessian(asked.model, asked.inputs, asked.target, dry_run=True, **given)
        return forecast
    with progress_bar() as tell:
        found: Hessian = hessian(
            asked.model, asked.inputs, asked.target, progress=lambda done, total: tell("hessian", done, total), **given
        )
    return found


def _draw(args: argparse.Namespace, asked: Asked, found: Hessian) -> None:
    from hessiankit.drawing.plots import heatmap  # Matplotlib takes a second that others need not wait for

    title = f"Hessian of {asked.name.partition(',')[0]}"
    heatmap(found.matrix, found.names, found.slices, title=title, path=args.plot)
    say(f"wrote {args.plot} and {args.plot.with_suffix('.csv')}")


def _numbers(args: argparse.Namespace, asked: Asked, found: Hessian | Forecast) -> dict[str, Any]:
    return {
        **asked.to_dict(),
        "seed": args.seed,
        "out": args.out,
        "forecast" if isinstance(found, Forecast) else "hessian": found.to_dict(),
        "environment": environment(),
    }
