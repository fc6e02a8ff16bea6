"""``hessiankit bounds``: print the norms of a block's Hessian beside the bounds, or attack the bounds."""

from __future__ import annotations

import argparse

import torch

from hessiankit.bounding.attack import attack
from hessiankit.bounding.report import bounds
from hessiankit.commands.exit_codes import FAILED, INTERRUPTED, OK
from hessiankit.commands.parsing import refuse
from hessiankit.files import write_json
from hessiankit.module_options import SHAPE_OF_A_BLOCK, block_of
from hessiankit.progress import progress_bar
from hessiankit.tables import show


def run_bounds(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or the file cannot be used.
    """
    if args.attack is not None:
        return _attack(args)
    torch.manual_seed(args.seed)
    block = block_of(args, args.d_model, args.d_ff)
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(args.scale if p.ndim == 2 else 1.0)
    x = torch.randn(args.tokens, args.d_model, dtype=torch.float64)
    labels = torch.randint(args.d_model, (args.tokens,))
    target = labels if args.loss == "cross_entropy" else torch.randn_like(x)
    report = bounds(block, x, target, loss=args.loss)
    show(report, args.table)
    write_json("bounds", args.json, report.to_dict())
    exceeded = any(not kind.startswith("printed") for _, kind, _ in report.violated)
    return FAILED if exceeded else OK


def _attack(args: argparse.Namespace) -> int:
    drawn = ("placement", "d_model", "d_ff", "tokens", "loss", "scale", *SHAPE_OF_A_BLOCK)
    refuse(args, drawn, "does not go with --attack, which draws all kinds of blocks; drop it")
    with progress_bar() as tell:
        report = attack(args.attack, seed=args.seed, tell=tell)
    show(report, args.table)
    write_json("bounds", args.json, report.to_dict())
    if report.interrupted:
        return INTERRUPTED
    return OK if report else FAILED
