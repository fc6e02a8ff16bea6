"""``hessiankit bounds``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from hessiankit.cli.options import BlockOptions, Device, Loss, Output, Sizes, listing
from hessiankit.cli.program import command

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = (
    ("hessiankit bounds --placement pre --heads 2 --loss cross_entropy", "every bound beside the norm that it bounds"),
    ("hessiankit bounds --no-affine --scale 0.1 --json bounds.json", "the paper's norms, small weights; all numbers in a file"),
)
app = command("bounds", EXAMPLES, "a bound is exceeded")


def drawn(sizes: Sizes, block: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the weights of a block by ``--scale``, and return a drawn input, labels and target for it."""
    import torch

    with torch.no_grad():
        for p in block.parameters():
            p.mul_(sizes.scale if p.ndim == 2 else 1.0)
    x = torch.randn(sizes.tokens, sizes.d_model, dtype=torch.float64, device="cpu")
    return x, torch.randint(sizes.d_model, (sizes.tokens,), device="cpu"), torch.randn_like(x)


@app.default
def run(
    *,
    block: BlockOptions = BlockOptions(),
    sizes: Sizes = Sizes(),
    loss: Loss = "mse",
    device: Device = "cpu",
    list_bounds: Annotated[bool, listing("hessiankit.theory.bounding.bounds:BOUNDS")] = False,
    output: Output = Output(),
) -> int:
    """Print the norms of a block's Hessian beside every bound on them.

    Draw a block, an input and a target, compute the exact Hessian and print the norm of each of its blocks beside the bounds
    (--list-bounds): certified from the matrix, structured from the intermediate values, and a priori from norms.

    Args:
        loss: Loss of the block's output.
        list_bounds: Print what each bound is computed from and exit.
    """
    block.check(sizes.d_model)

    import torch

    from hessiankit.cli.loss_problem import block_of
    from hessiankit.theory.bounding.bounds import bounds

    torch.manual_seed(sizes.seed)
    module = block_of(block, sizes.d_model, sizes.d_ff)
    x, labels, target = (tensor.to(device) for tensor in drawn(sizes, module))
    module.to(device)
    report = bounds(module, x, labels if loss == "cross_entropy" else target, loss=loss)
    output.finish(report)
    return int(bool(report.violated))
