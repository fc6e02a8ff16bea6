"""Print the norms of a block's Hessian beside every bound on them.

Draw a block, an input and a target, compute the exact Hessian and print the norm of each of its blocks beside the bounds
(--list-bounds): certified from the matrix, structured from the intermediate values, and a priori from norms.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hessiankit.cli import parsing

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = (
    ("hessiankit bounds --placement pre --heads 2 --loss cross_entropy", "every bound beside the norm that it bounds"),
    ("hessiankit bounds --no-affine --scale 0.1 --json bounds.json", "the paper's norms, small weights; all numbers in a file"),
)
FAILS = "a bound is exceeded"


def options(command: parsing.Parser) -> None:
    """Add the options."""
    add = command.add_argument
    parsing.add_block_options(add)
    add_sizes(add)
    add("--loss", choices=parsing.LOSSES, default="mse", help="mse (default) or cross_entropy")
    parsing.add_arithmetic(add, dtype=None)
    registry, listed = "hessiankit.bounding.bounds:BOUNDS", "print what each bound is computed from and exit"
    add("--list-bounds", action=parsing.ListEntries, const=registry, nargs=0, help=listed)
    parsing.add_output(add)


def add_sizes(add: parsing.Add) -> None:
    """Add the options that :func:`drawn` reads, and ``--d-ff`` and ``--seed``."""
    add("--d-model", type=parsing.positive, default=4, help="width of a token (default 4)")
    add("--d-ff", type=parsing.positive, default=6, help="hidden width of the feed-forward network (default 6)")
    add("--tokens", type=parsing.positive, default=4, help="tokens of the sequence (default 4)")
    add("--scale", type=parsing.positive_number, default=1.0, help="factor on the initial weights, above 0 (default 1)")
    add("--seed", type=parsing.seed, default=0, help="random seed (default 0)")


def drawn(args: argparse.Namespace, block: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the weights of a block by ``--scale``, and return a drawn input, labels and target for it."""
    import torch

    with torch.no_grad():
        for p in block.parameters():
            p.mul_(args.scale if p.ndim == 2 else 1.0)
    x = torch.randn(args.tokens, args.d_model, dtype=torch.float64, device="cpu")
    return x, torch.randint(args.d_model, (args.tokens,), device="cpu"), torch.randn_like(x)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    parsing.check_block(args)

    import torch

    from hessiankit.bounding.bounds import bounds
    from hessiankit.cli.module_options import block_of

    torch.manual_seed(args.seed)
    block = block_of(args, args.d_model, args.d_ff)
    x, labels, target = (tensor.to(args.device) for tensor in drawn(args, block))
    block.to(args.device)
    report = bounds(block, x, labels if args.loss == "cross_entropy" else target, loss=args.loss)
    parsing.finish(args, report)
    return int(bool(report.violated))
