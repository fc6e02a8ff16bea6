"""``python -m papers bounds``."""

from __future__ import annotations

from hessiankit.cli.bounds import drawn
from hessiankit.cli.options import Flag, Output, Sizes
from hessiankit.cli.program import command

EXAMPLES = (
    ("python -m papers bounds --scale 0.1", "Theorem 6 beside the norms of the block, small weights"),
    ("python -m papers bounds --attention --json bounds.json", "Theorem 1 beside those of the attention; all numbers in a file"),
)
app = command("bounds", EXAMPLES, "a valid bound is exceeded")


@app.default
def run(*, attention: Flag = False, sizes: Sizes = Sizes(), output: Output = Output()) -> int:
    """Print the norms of a paper's block or attention beside the valid bounds and the printed ones.

    Draw the post-norm block of Closing the Curvature Gap (one head, ReLU, LayerNorms without gain and shift) or its attention,
    an input and a target, compute the exact Hessian and print the norm of each of its blocks beside the bounds of hessiankit
    bounds and beside Theorems 1 and 6 as printed, which may be exceeded.

    Args:
        attention: The attention by itself, without the rest of the block.
    """
    import torch

    from hessiankit.blocks import Attention, TransformerBlock
    from papers.curvature_gap.printed_bounds import PRINTED, printed_bounds

    torch.manual_seed(sizes.seed)
    block = Attention(sizes.d_model) if attention else TransformerBlock(sizes.d_model, sizes.d_ff, affine=False)
    x, _, target = drawn(sizes, block.double())
    report = printed_bounds(block, x, target)
    output.finish(report)
    return int(any(kind not in PRINTED for _, kind, _ in report.violated))
