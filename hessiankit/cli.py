"""The command line: ``hessiankit check`` (also ``python -m hessiankit check``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hessiankit import __version__
from hessiankit.errors import HessiankitError

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
        "other routes. Prints a table, writes heat maps and a JSON report. Exit code 0: everything that could be compared agrees; "
        "1: something disagrees; 2: an option or a file cannot be used; 130: interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    check.add_argument("--data", default="digits", help="'digits', or a path to MNIST's IDX files or the Python version of CIFAR")
    check.add_argument("--d-model", type=_positive, default=16, help="width of a token")
    check.add_argument("--d-ff", type=_positive, default=64, help="hidden width of the feed-forward network")
    check.add_argument("--seq-len", type=_positive, default=None, help="tokens an image is cut into (default: patches of 2 x 2)")
    check.add_argument("--loss", choices=("both", "mse", "cross_entropy"), default="both", help="which loss to study")
    check.add_argument("--steps", type=_positive, default=300, help="training steps")
    check.add_argument("--batch", type=_positive, default=128, help="images of the Hessian's batch")
    check.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="arithmetic")
    check.add_argument("--device", default="cpu", help="where to compute, e.g. cuda")
    check.add_argument("--seed", type=int, default=0, help="of initialisation, batches and directions")
    check.add_argument("--directions", type=_positive, default=2, help="generic directions a parameter for the comparison")
    check.add_argument("--no-full", dest="full", action="store_false", help="skip the entry-by-entry comparison at the end")
    check.add_argument("--out", type=Path, default=Path("results/check"), help="folder for the report and the heat maps")
    check.add_argument("--quick", action="store_true", help="a small model and batch: a few seconds")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    try:
        return _check(args, console)
    except HessiankitError as error:
        print(f"hessiankit: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("hessiankit: interrupted", file=sys.stderr)
        return INTERRUPTED


def _check(args: argparse.Namespace, console: Console) -> int:
    from hessiankit.study import StudyOptions, run_study

    losses = ("mse", "cross_entropy") if args.loss == "both" else (args.loss,)
    options = StudyOptions(
        data=args.data, d_model=args.d_model, d_ff=args.d_ff, seq_len=args.seq_len, losses=losses, steps=args.steps, batch=args.batch,
        dtype=args.dtype, device=args.device, seed=args.seed, directions=args.directions, full=args.full, out=args.out,
    )
    return 0 if run_study(options.quick() if args.quick else options, console).passed else FAILED


if __name__ == "__main__":
    sys.exit(main())
