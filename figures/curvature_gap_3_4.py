"""Figures 3 and 4 of Closing the Curvature Gap: the Hessian's entries at initialisation and after training.

The classifier of Table 1's first row (patches, one post-norm block with d_model 16 and d_ff 64, the mean over tokens),
cross entropy on one batch of 128 training images. The images are scikit-learn's 8 x 8 digits in patches of 2 x 2, so
that there are 16 tokens where MNIST has 49. The paper names neither optimiser nor number of steps: here AdamW, lr 3e-3,
1000 steps.

Three pictures: both Hessians with all blocks drawn equally large, the spectral norms of the blocks after training, and how many
times larger they are than at the initial weights. The paper sees every block grow and the Values' become the largest one. Here
all blocks of two parameters before the last norm grow, while those of the last norm and the classifier shrink; and inside the
transformer block W_2's is the largest, with initial weights of variance 1/fan_in, the Values' second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import hessiankit
from figures._digits import LOSS, classifiers, scale_of_images, snapshots
from figures._kit import save, write_verdicts
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.curvature.plots import block_norms_map, side_by_side
from papers.experiments.training import accuracy

NAME = Path(__file__).stem


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits", run: Path | None = None) -> list[Path]:
    """Train, compute both Hessians and draw (about 20 s of CPU); ``quick`` takes four tokens, d_model 8, 60 steps, 32 images."""
    steps, size = (60, 32) if quick else (1000, 128)
    (spec, *_), (*_, steps) = classifiers("curvature-gap/mnist", (0, steps), images=images, quick=quick, run=run)
    models = dict(snapshots(out, spec, (0, steps)))
    seen = {split: accuracy(models[steps], *spec.data(split)) for split in ("train", "test")}
    print(f"  after {steps} steps: training accuracy {seen['train']:.1%}, validation accuracy {seen['test']:.1%}")
    batch = spec.data(count=size)
    before, after = (hessiankit.hessian(models[step], *batch, loss=LOSS) for step in (0, steps))

    names, slices = before.names, before.slices
    titles = ("At initialisation", f"After {steps} steps (validation accuracy {seen['test']:.0%})")
    paths = [out / f"{NAME}{part}{suffix}" for part in ("", "_norms_after", "_growth")]
    norms = [
        torch.tensor([[float(torch.linalg.matrix_norm(one.matrix[slices[i], slices[j]], 2)) for j in names] for i in names])
        for one in (before, after)
    ]
    said = verdicts(names, norms[0], norms[1], seen["test"], scale_of_images(spec, 1, steps, size))
    growth = torch.where(norms[0] > 0, norms[1] / norms[0], 0.0)
    title = f"Spectral norms of the Hessian's blocks after {steps} steps"
    growing = f"Growth of the blocks' spectral norms, after {steps} steps over before"
    numbers = [path.with_suffix(".csv") for path in paths]
    pictures = (
        side_by_side([before.matrix, after.matrix], names, slices, titles=titles, path=numbers[0]),
        block_norms_map(norms[1], names, title=title, path=numbers[1]),
        block_norms_map(growth, names, title=growing, path=numbers[2], norm="after / before"),
    )
    for path, picture, shown in zip(paths, pictures, (said, said[1:], said[1:]), strict=True):
        save(picture, path, shown)
    return [*paths, *numbers, write_verdicts(out, NAME, said)]


def verdicts(names: Sequence[str], before: Tensor, after: Tensor, accuracy: float, scale: str) -> list[Verdict]:
    """Return what the two Hessians show of Figures 3 and 4, by the spectral norms of their blocks."""
    where = {name.rpartition(".")[2]: k for k, name in enumerate(names)}
    q, k, v = (float(before[where[W], where[W]]) for W in ("W_Q", "W_K", "W_V"))
    positive = before.diagonal()[before.diagonal() > 0]
    spread = float(positive.max() / positive.min())
    fig3 = (
        in_every("the diagonal blocks' norms spread over more than a factor 10", [spread > 10], f"{spread:.0f}"),
        in_every(
            "the Values' block is larger than the Queries' and the Keys'", [v > max(q, k)], f"{v:.2g} against {q:.2g}, {k:.2g}"
        ),
    )
    grown, count = int((after > before).sum()), after.numel()
    largest = [divmod(int(k), len(names)) for k in after.flatten().argsort(descending=True)[:2]]
    shown = ", ".join(f"{short(names[i])} with {short(names[j])} {float(after[i, j]):.2g}" for i, j in largest)
    both = (where["W_V"], where["W_V"])
    trained = unreached(validation_accuracy=(accuracy, 0.5))
    fig4 = (
        in_every("every block has grown", [grown == count], f"{grown} of {count}", trained),
        in_every(
            "the Values-Values block is the largest", [largest[0] == both], f"it has {float(after[both]):.2g}; {shown}", trained
        ),
    )
    return [
        Verdict("curvature-gap/fig3", "the blocks differ widely, and the Values' is larger than Queries' and Keys'", scale, fig3),
        Verdict("curvature-gap/fig4", "after training every block is larger, the Values-Values block the largest", scale, fig4),
    ]


def short(name: str) -> str:
    """Return the last two parts of a parameter's name.

    >>> short("blocks.0.attention.W_V")
    'attention.W_V'
    """
    return ".".join(name.split(".")[-2:])
