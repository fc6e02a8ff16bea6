"""Figures 3 and 4 of Closing the Curvature Gap: the Hessian's entries at initialisation and after training.

The classifier of Table 1's first row (patches, one post-norm block with d_model 16 and d_ff 64, the mean over tokens),
cross entropy on one batch of 128 training images. The images are scikit-learn's 8 x 8 digits in patches of 2 x 2, so
that there are 16 tokens where MNIST has 49. The paper names neither optimiser nor number of steps: here AdamW, lr 3e-3,
1000 steps.

Four pictures: both Hessians with all blocks drawn equally large, the same to scale, and the spectral norms of the blocks
at both points. The paper sees every block grow and the Values' become the largest one. Here all blocks of two parameters
before the last norm grow, while those of the last norm and the classifier shrink; and inside the transformer block W_2's
is the largest, with initial weights of variance 1/fan_in, the Values' second.
"""

from __future__ import annotations

from pathlib import Path

import torch

import hessiankit
from figures._digits import LOSS, ImageSpec, snapshots
from figures._store import writing
from hessiankit.curvature.plots import block_norms_map, side_by_side
from hessiankit.studies.training import accuracy

NAME = Path(__file__).stem


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits") -> list[Path]:
    """Train, compute both Hessians and draw (about 20 s of CPU); ``quick`` takes four tokens, d_model 8, 60 steps, 32 images."""
    spec, (steps, size) = ImageSpec.of(images, quick=quick), (60, 32) if quick else (1000, 128)
    models = dict(snapshots(out, spec, (0, steps)))
    seen = {split: accuracy(models[steps], *spec.data(split)) or 0.0 for split in ("train", "test")}
    print(f"  after {steps} steps: training accuracy {seen['train']:.1%}, validation accuracy {seen['test']:.1%}")
    batch = spec.data(count=size)
    before, after = (hessiankit.hessian(models[step], *batch, loss=LOSS) for step in (0, steps))

    names, slices = before.names, before.slices
    titles = ("At initialisation", f"After {steps} steps (validation accuracy {seen['test']:.0%})")
    paths = [out / f"{NAME}{part}{suffix}" for part in ("", "_to_scale", "_norms_before", "_norms_after")]
    for path, scale in zip(paths, ("blocks", "parameters"), strict=False):
        with writing(path):
            side_by_side([before.matrix, after.matrix], names, slices, titles=titles, scale=scale, path=path)
    for path, hessian, title in zip(paths[2:], (before, after), titles, strict=True):
        norms = [[float(torch.linalg.matrix_norm(hessian.matrix[slices[i], slices[j]], 2)) for j in names] for i in names]
        with writing(path):
            block_norms_map(norms, names, title=f"Hessian blocks {title[0].lower()}{title[1:]}", path=path)
    return [*paths, *(path.with_suffix(".csv") for path in paths)]
