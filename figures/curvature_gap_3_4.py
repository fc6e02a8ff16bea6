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
from hessiankit.blocks import VisionTransformer
from hessiankit.data import load_images, patchify
from hessiankit.drawing.plots import block_norms_map, side_by_side
from hessiankit.training import train

NAME = Path(__file__).stem


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train, compute both Hessians and draw; ``quick`` takes 4 x 4 patches, d_model 8, d_ff 16, 60 steps, 32 images."""
    patch, d_model, d_ff, steps, size = (4, 8, 16, 60, 32) if quick else (2, 16, 64, 1000, 128)
    data, held_out = (load_images("digits", split=split, dtype=torch.float64) for split in ("train", "test"))
    inputs, validation = patchify(data.images, patch), patchify(held_out.images, patch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(inputs.shape[2], inputs.shape[1], 10, d_model=d_model, d_ff=d_ff, bias=True).double()
    batch, labels = inputs[:size], data.labels[:size]

    before = hessiankit.hessian(model, batch, labels, loss="cross_entropy")
    run = train(model, inputs, data.labels, steps=steps, validation=(validation, held_out.labels))
    print(f"  trained: {run}")
    after = hessiankit.hessian(model, batch, labels, loss="cross_entropy")

    names, slices = before.names, before.slices
    titles = ("At initialisation", f"After {run.steps} steps (validation accuracy {run.validation_accuracy:.0%})")
    paths = [out / f"{NAME}{part}{suffix}" for part in ("", "_to_scale", "_norms_before", "_norms_after")]
    for path, scale in zip(paths, ("blocks", "parameters"), strict=False):
        side_by_side([before.matrix, after.matrix], names, slices, titles=titles, scale=scale, path=path)
    for path, hessian, title in zip(paths[2:], (before, after), titles, strict=True):
        norms = [[float(torch.linalg.matrix_norm(hessian.matrix[slices[i], slices[j]], 2)) for j in names] for i in names]
        block_norms_map(norms, names, title=f"Hessian blocks {title[0].lower()}{title[1:]}", path=path)
    return paths
