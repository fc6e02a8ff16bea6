"""The command line, ``hessiankit`` or ``python -m hessiankit``: a command each for the toolkit's main jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from hessiankit import __version__
from hessiankit.block_options import positive
from hessiankit.bounding.command import add_bounds, run_bounds
from hessiankit.derivation.command import add_derive, run_derive
from hessiankit.errors import HessiankitError, InputError
from hessiankit.estimation.command import add_sharpness, run_sharpness
from hessiankit.files import write_json, write_text
from hessiankit.ledger.command import add_claims, run_claims
from hessiankit.monitoring.command import add_monitor, run_monitor
from hessiankit.tuning.command import add_tune, run_tune

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(prog="hessiankit", description="Closed-form curvature of transformers, checked.")
    top.add_argument("--version", action="version", version=f"hessiankit {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="train the paper's classifier and check its exact Hessian against automatic differentiation",
        description="Train one post-norm transformer block on images, compute the exact Hessian of a batch at initialisation and "
        "after training, for squared error and cross entropy, and compare it block pair by block pair with references that take "
        "other routes. Prints a table, writes heat maps and a JSON report. Exit code 0: all that could be compared agrees; "
        "1: something disagrees; 2: an option or a file cannot be used; 130: interrupted.",
    )
    add = check.add_argument
    add("--data", help="'digits' (default), or a path to MNIST's IDX files or the Python version of CIFAR")
    add("--d-model", type=positive, help="width of a token (default 16; --quick 8)")
    add("--d-ff", type=positive, help="hidden width of the feed-forward network (default 64; --quick 16)")
    add(
        "--seq-len",
        type=positive,
        help="tokens an image is cut into (default: patches of 2 x 2, of 4 x 4 beyond 16 pixels; --quick 4)",
    )
    add("--loss", choices=("both", "mse", "cross_entropy"), default="both", help="which loss to study (default both)")
    add("--steps", type=positive, help="training steps (default 300; --quick 40)")
    add("--batch", type=positive, help="images of the Hessian's batch (default 128; --quick 16)")
    add("--dtype", choices=("float64", "float32"), help="arithmetic (default float64)")
    add("--device", help="where to compute, e.g. cuda (default cpu)")
    add("--seed", type=int, help="of initialisation, batches and directions (default 0)")
    add("--directions", type=positive, help="generic directions a parameter for the comparison (default 1)")
    add(
        "--full",
        action=argparse.BooleanOptionalAction,
        help="compare and time every entry at the end (default only with --quick)",
    )
    add(
        "--exact",
        action="store_true",
        default=None,
        help="also check every formula, and whole blocks of every norm placement, in exact arithmetic (about two minutes)",
    )
    add("--out", type=Path, help="folder for the report and the heat maps (default results/check)")
    add("--quick", action="store_true", help="a small model and batch: a few seconds; other options still count")
    _add_placements(check)
    _add_routes(commands)
    add_claims(commands)
    add_derive(commands)
    add_bounds(commands)
    add_sharpness(commands)
    add_monitor(commands)
    add_tune(commands)
    return top


def _add_placements(check: argparse.ArgumentParser) -> None:
    add = check.add_argument_group(
        "every norm placement",
        "Instead of the study above: the exact Hessian of tiny language models for every norm placement, combined with every "
        "kind of norm, activation, heads, mask, depth and loss (half an hour on one core). Interrupted, the same command goes "
        "on. Of the options above, --seed and --out (default results/placements) count.",
    ).add_argument
    add("--placements", action="store_true", help="check the grid of placements")
    add("--placement", action="append", metavar="NAME", help="only this placement, e.g. hybridnorm (may be repeated)")
    add("--sample", type=positive, metavar="N", help="only N cases, drawn by --seed, the placements taking turns")
    add("--jobs", type=positive, metavar="N", help="processes that share the work (default 1)")


def _add_routes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    routes = commands.add_parser(
        "routes",
        help="show which of torch's routes to second derivatives are right, wrong or missing, operation by operation",
        description="Differentiate every operation of a transformer twice by every route of the installed torch, on tiny "
        "float64 problems, and compare with the closed form and with central differences. Prints a table; it takes about ten "
        "seconds. Exit code 0 whatever the table says: it is about torch; 2: an option or a file cannot be used.",
    )
    add = routes.add_argument
    add("--operation", action="append", metavar="NAME", help="only this operation, e.g. layer_norm (may be repeated)")
    add("--json", type=Path, metavar="PATH", help="also write every number to this file")
    add("--markdown", type=Path, metavar="PATH", help="also write the table as Markdown (docs/routes.md is made so)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    run = {
        "check": lambda args: _check(args, console),
        "routes": _routes,
        "claims": run_claims,
        "derive": run_derive,
        "bounds": run_bounds,
        "sharpness": run_sharpness,
        "monitor": run_monitor,
        "tune-lr": run_tune,
    }
    try:
        return run[args.command](args)
    except HessiankitError as error:
        print(f"hessiankit: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("hessiankit: interrupted", file=sys.stderr)
        return INTERRUPTED


def _check(args: argparse.Namespace, console: Console) -> int:
    if args.placements:
        return _placements(args, console)
    alone = [name for name in ("placement", "sample", "jobs") if getattr(args, name) is not None]
    if alone:
        raise InputError(f"check: --{alone[0]} is of the grid of norm placements; add --placements")
    from hessiankit.study import QUICK, StudyOptions, run_study

    given = {f.name: getattr(args, f.name) for f in fields(StudyOptions) if getattr(args, f.name, None) is not None}
    losses = ("mse", "cross_entropy") if args.loss == "both" else (args.loss,)
    options = StudyOptions(**{**(QUICK if args.quick else {}), **given, "losses": losses})
    return 0 if run_study(options, console).passed else FAILED


def _placements(args: argparse.Namespace, console: Console) -> int:
    from hessiankit.placement_report import run_placements

    study = ("data", "d_model", "d_ff", "seq_len", "steps", "batch", "dtype", "device", "directions", "full", "exact")
    other = [name for name in study if getattr(args, name) is not None]
    other += [name for name in ("quick",) if getattr(args, name)] + (["loss"] if args.loss != "both" else [])
    if other:
        named = f"--{other[0].replace('_', '-')}"
        raise InputError(f"check: {named} does not go with --placements, whose sizes are fixed; drop it, or see --sample")
    words = ["hessiankit check --placements", *(f"--placement '{name}'" for name in args.placement or ())]
    words += [f"--sample {args.sample} --seed {args.seed or 0}"] if args.sample else []
    out = args.out or Path("results/placements")
    options = {"sample": args.sample, "seed": args.seed or 0, "jobs": args.jobs or 1, "out": out, "command": " ".join(words)}
    return 0 if run_placements(console, args.placement, **options) else FAILED


def _routes(args: argparse.Namespace) -> int:
    from hessiankit.verify.routes import routes

    found = routes(args.operation)
    print(found)
    write_json("routes", args.json, found.to_dict())
    write_text("routes", args.markdown, found.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
