"""Print the norms of a block's Hessian beside every bound on them.

Draw a block, an input and a target, compute the exact Hessian and print the norm of each of its blocks beside the bounds
(--list-bounds): certified from the matrix, structured from the intermediate values, a priori from norms, and as printed in
Closing the Curvature Gap where that is defined. With --attack N, try to violate the valid bounds on N random problems instead.
"""

from __future__ import annotations

import argparse

from hessiankit.cli.parsing import (
    INTERRUPTED,
    Parser,
    add_block_options,
    add_list,
    add_output,
    finish,
    positive,
    positive_number,
    refuse,
    seed,
)

EXAMPLES = (
    ("hessiankit bounds --placement pre --heads 2 --loss cross_entropy", "every bound beside the norm that it bounds"),
    ("hessiankit bounds --no-affine --scale 0.1 --json bounds.json", "the paper's norms, small weights; all numbers in a file"),
    ("hessiankit bounds --attack 100 --seed 7", "try to violate the bounds"),
)
FAILS = "a valid bound is exceeded"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add_block_options(add)
    add("--d-model", type=positive, default=4, help="width of a token (default 4)")
    add("--d-ff", type=positive, default=6, help="hidden width of the feed-forward network (default 6)")
    add("--tokens", type=positive, default=4, help="tokens of the sequence (default 4)")
    add("--loss", default="mse", help="mse (default) or cross_entropy")
    add_list(add, "--list-bounds", "hessiankit.bounding.bounds:BOUNDS", "print what each bound is computed from and exit")
    add("--scale", type=positive_number, default=1.0, help="factor on the initial weights, above 0 (default 1)")
    add("--seed", type=seed, default=0, help="random seed (default 0)")
    attack = (
        "try to violate every valid bound on N problems of all placements and scales, problem k drawn from --seed + k; of "
        "the other options only --json may be given; an interrupt keeps what is found"
    )
    add("--attack", type=positive, metavar="N", help=attack)
    add_output(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import torch

    from hessiankit.bounding.bounds import BOUNDS, bounds
    from hessiankit.cli.module_options import block_of

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
    finish(args, report)
    return int(any(not BOUNDS[kind].printed for _, kind, _ in report.violated))


def _attack(args: argparse.Namespace) -> int:
    from hessiankit.bounding.attack import attack
    from hessiankit.cli.module_options import SHAPE_OF_A_BLOCK
    from hessiankit.support.progress import progress_bar

    drawn = ("placement", "d_model", "d_ff", "tokens", "loss", "scale", *SHAPE_OF_A_BLOCK)
    refuse(args, drawn, "does not go with --attack, which draws all kinds of blocks; drop it")
    with progress_bar() as tell:
        report = attack(args.attack, seed=args.seed, tell=tell)
    finish(args, report)
    return INTERRUPTED if report.interrupted else int(not report)
