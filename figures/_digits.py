"""Small classifiers of images, trained once and kept at the steps that a figure reads: what the figures of digits share.

The model is that of Closing the Curvature Gap, Table 1, first row: patches, one post-norm block with d_model 16 and d_ff 64,
the mean over the tokens. scikit-learn's 8 x 8 digits in patches of 2 x 2 give 16 tokens where MNIST's 28 x 28 in patches of 4 x 4
give 49. The paper names neither optimiser nor learning rate: here AdamW, 3e-3, batches of 128. All in float64.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from figures._kit import short_digest, version
from hessiankit.blocks import VisionTransformer
from hessiankit.curvature import Hessian, hessian
from hessiankit.data import load_images, patchify
from hessiankit.training import train

CODE = ("hessiankit/blocks", "hessiankit/data.py", "hessiankit/training.py", "figures/_digits.py")
"""What the digits of a run depend on."""
LOSS = "cross_entropy"


@dataclass(frozen=True)
class ImageSpec:
    """Everything that a run depends on.

    Attributes:
        patch: Side of a patch.
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward network.
        n_blocks: Transformer blocks.
        activation: Of the feed-forward network.
        lr: Of AdamW, constant.
        batch_size: Images an update.
        seed: Of the initial weights and of the batches.
        source: ``"digits"``, or a path that ``hessiankit.data.load_images`` reads.
    """

    patch: int = 2
    d_model: int = 16
    d_ff: int = 64
    n_blocks: int = 1
    activation: str = "relu"
    lr: float = 3e-3
    batch_size: int = 128
    seed: int = 0
    source: str = "digits"

    def data(self, split: str = "train") -> tuple[Tensor, Tensor]:
        """Return tokens ``(N, L, patch_dim)`` and labels ``(N,)``."""
        images = load_images(self.source, split=split, dtype=torch.float64)
        return patchify(images.images, self.patch), images.labels

    def model(self) -> VisionTransformer:
        """Return the model at its initial weights; the caller's random state is left alone."""
        images = load_images(self.source, dtype=torch.float64).first(1)
        tokens = patchify(images.images, self.patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return VisionTransformer(
                tokens.shape[2], tokens.shape[1], images.n_classes, d_model=self.d_model, d_ff=self.d_ff, bias=True,
                n_blocks=self.n_blocks, activation=self.activation,
            ).double()  # fmt: skip


SMALL = ImageSpec(patch=4, d_model=8, d_ff=16)
"""What quick modes train: 4 tokens, 762 parameters."""


def snapshots(out: Path, spec: ImageSpec, steps: Iterable[int]) -> Iterator[tuple[int, VisionTransformer]]:
    """Yield the model after each number of steps, in ascending order; what is kept below ``out/cache`` is not trained again.

    The digits are those of one run without a break.
    """
    tokens, labels = spec.data()
    folder = out / "cache" / f"digits-{short_digest({'spec': spec, 'made by': version(*CODE)})}"
    previous: Path | None = None
    for step in sorted(set(steps)):
        path = folder / f"{step}.pt"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            growing = folder / f"to-{step}.pt"
            if previous is not None and not growing.exists():
                shutil.copyfile(previous, growing)
            options: dict[str, Any] = {"batch_size": spec.batch_size, "lr": spec.lr, "seed": spec.seed}
            train(spec.model(), tokens, labels, steps=step, checkpoint=growing, **options)
            os.replace(growing, path)
        previous = path
        model = spec.model()
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
        yield step, model


def block_norms(
    model: VisionTransformer, batch: tuple[Tensor, Tensor], names: Iterable[str] | None = None
) -> dict[str, list[float]]:
    """Return (||W||_2, ||W||_F, ||H_WW||_2, ||H_WW||_F) of parameters by name; of all of them by default.

    The parameters' Hessian blocks are computed one at a time, from the closed forms. ||.||_2 of a vector is its length.
    """
    found: Hessian = hessian(model, *batch, loss=LOSS, lazy=True)
    parameters = dict(model.named_parameters())
    norms = {}
    for name in parameters if names is None else names:
        W = parameters[name].detach()
        H = found.block(name, name)
        own = float(torch.linalg.matrix_norm(W, 2)) if W.ndim == 2 else float(W.norm())
        norms[name] = [own, float(W.norm()), float(torch.linalg.eigvalsh(H).abs().max()), float(H.norm())]
    return norms
