"""``hessiankit bounds`` on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hessiankit.block_options import add_block_options, block_of, positive
from hessiankit.bounding.attack import attack
from hessiankit.bounding.report import bounds
from hessiankit.files import write_json
from hessiankit.progress import progress_bar

INTERRUPTED = 130


def add_bounds(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "bounds",
        help="print the norms of a block's Hessian beside every bound on them",
        description="Draw a block, an input and a target, compute the exact Hessian and print the norm of each of its "
        "blocks beside the bounds: certified from the matrix, structured from the intermediate values, a priori from norms, and "
        "as printed in Closing the Curvature Gap where that is defined. With --attack N, try to violate the valid bounds on N "
        "random problems instead. Exit code 0: no valid bound is exceeded; 1: one is; "
        "2: an option or a file cannot be used; 130: interrupted.",
    )
    add_block_options(command.add_argument)
    add = command.add_argument
    add("--d-model", type=positive, default=4, help="width of a token (default 4)")
    add("--d-ff", type=positive, default=6, help="hidden width of the feed-forward network (default 6)")
    add("--tokens", type=positive, default=4, help="tokens of the sequence (default 4)")
    add("--loss", default="mse", help="mse (default) or cross_entropy")
    add("--scale", type=float, default=1.0, help="factor on the initial weights (default 1)")
    add("--no-affine", action="store_true", help="norms without gain and bias, as in the paper")
    add("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    add(
        "--attack",
        type=positive,
        metavar="N",
        help="try to violate every valid bound on N problems of all placements and scales, problem k drawn from --seed + k; of "
        "the other options only --json counts; an interrupt keeps what is found",
    )
    add("--json", type=Path, metavar="PATH", help="also write every number to this file")


def run_bounds(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or the file cannot be used.
    """
    if args.attack is not None:
        return _attack(args)
    torch.manual_seed(args.seed)
    block = block_of(args, args.d_model, args.d_ff, affine=not args.no_affine)
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(args.scale if p.ndim == 2 else 1.0)
    x = torch.randn(args.tokens, args.d_model, dtype=torch.float64)
    labels = torch.randint(args.d_model, (args.tokens,))
    target = labels if args.loss == "cross_entropy" else torch.randn_like(x)
    report = bounds(block, x, target, loss=args.loss)
    print(report)
    write_json("bounds", args.json, report.to_dict())
    return int(any(not kind.startswith("printed") for _, kind, _ in report.violated))


def _attack(args: argparse.Namespace) -> int:
    with progress_bar() as tell:
        report = attack(args.attack, seed=args.seed, tell=tell)
    print(report)
    write_json("bounds", args.json, report.to_dict())
    return INTERRUPTED if report.interrupted else int(not report)
