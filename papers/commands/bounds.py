"""Print the norms of a paper's block or attention beside the valid bounds and the printed ones.

Draw the post-norm block of Closing the Curvature Gap (one head, ReLU, LayerNorms without gain and shift) or its attention, an
input and a target, compute the exact Hessian and print the norm of each of its blocks beside the bounds of hessiankit bounds and
beside Theorems 1 and 6 as printed, which may be exceeded.
"""

from __future__ import annotations

import argparse

from hessiankit.cli.bounds import add_sizes, drawn
from hessiankit.cli.parsing import Parser, add_output, finish

EXAMPLES = (
    ("python -m papers bounds --scale 0.1", "Theorem 6 beside the norms of the block, small weights"),
    ("python -m papers bounds --attention --json bounds.json", "Theorem 1 beside those of the attention; all numbers in a file"),
)
FAILS = "a valid bound is exceeded"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--attention", action="store_true", help="the attention by itself, without the rest of the block")
    add_sizes(add)
    add_output(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import torch

    from hessiankit.blocks import Attention, TransformerBlock
    from papers.curvature_gap.printed_bounds import PRINTED, printed_bounds

    torch.manual_seed(args.seed)
    block = Attention(args.d_model) if args.attention else TransformerBlock(args.d_model, args.d_ff, affine=False)
    x, _, target = drawn(args, block.double())
    report = printed_bounds(block, x, target)
    finish(args, report)
    return int(any(kind not in PRINTED for _, kind, _ in report.violated))
