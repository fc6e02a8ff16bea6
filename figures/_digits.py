"""Small classifiers of images, trained once and stored at the steps that figures read.

The model is that of Closing the Curvature Gap, Table 1, first row: patches, one post-norm block with d_model 16 and d_ff 64,
the mean over the tokens. scikit-learn's 8 x 8 digits in patches of 2 x 2 give 16 tokens where MNIST's 28 x 28 in patches of 4 x 4
give 49. The paper names neither optimiser nor learning rate: here AdamW, 3e-3, batches of 128. All in float64. Other images are
read from a path, those of 16 pixels and more in the paper's patches of 4 x 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from figures._kit import CODE as TOOLKIT
from figures._kit import differentiable, plain, short_digest
from figures._trained import arms
from hessiankit.blocks import VisionTransformer
from hessiankit.cli.study import patchify
from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.support.environment import code_version
from papers.experiments.images import ImageDataset, load_images
from papers.experiments.runs import read_run
from papers.experiments.spec import model_of, scale
from papers.experiments.store import NOTHING, keep, recall
from papers.experiments.training import train

CODE = (
    "hessiankit/blocks",
    "hessiankit/cli/study.py",
    "papers/experiments/images.py",
    "papers/experiments/training.py",
    "figures/_digits.py",
)
"""What the digits of a run depend on."""
MEASURED_BY = (*TOOLKIT, "figures/_digits.py")
"""What norms of blocks depend on."""
LOSS = "cross_entropy"
QUICK: dict[str, Any] = {"d_model": 8, "d_ff": 16}
"""Of quick modes: with the digits' four tokens, 762 parameters."""
MOST = 10_000
"""Images that are read of a set."""


@dataclass(frozen=True)
class ImageSpec:
    """Everything that a run depends on.

    Attributes:
        patch: Side of a patch.
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward network.
        n_blocks: Transformer blocks.
        activation: Of the feed-forward network.
        placement: Where the norms stand, a name in ``hessiankit.blocks.PLACEMENTS``.
        lr: Of AdamW, constant.
        batch_size: Images an update.
        seed: Of the initial weights and of the batches.
        source: ``"digits"``, or a path that ``papers.experiments.images.load_images`` reads.
        folder: Folder of a finished run, whose models these are; "" for models that are trained here.
    """

    patch: int = 2
    d_model: int = 16
    d_ff: int = 64
    n_blocks: int = 1
    activation: str = "relu"
    placement: str = "post"
    lr: float = 3e-3
    batch_size: int = 128
    seed: int = 0
    source: str = "digits"
    folder: str = ""

    @classmethod
    def of(cls, source: str = "digits", *, quick: bool = False) -> ImageSpec:
        """Return Table 1's classifier of an image set; ``quick``: few tokens of at most 200 numbers, d_model 8, d_ff 16.

        Raises:
            InputError: The set cannot be read.

        >>> ImageSpec.of().patch, ImageSpec.of(quick=True) == ImageSpec(patch=4, d_model=8, d_ff=16)
        (2, True)
        """
        image = images_of(source).images[0]
        side, numbers = min(image.shape[:2]), image.numel()
        if quick:
            patch = max(p for p in range(1, side // 2 + 1) if side % p == 0 and numbers * p * p <= 200 * side * side)
            return cls(patch=patch, source=source, **QUICK)
        return cls(patch=2 if side < 16 else 4, source=source)

    def shown(self, count: int) -> str:
        """Return what a caption says of some images.

        >>> ImageSpec().shown(128)
        '128 digits'
        """
        return f"{count} digits" if self.source == "digits" else f"{count} images of {images_of(self.source).name}"

    def data(self, split: str = "train", count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens ``(N, L, patch_dim)`` and labels ``(N,)`` of the first images, by default at most :data:`MOST`.

        Raises:
            InputError: The set cannot be read, or has fewer.
        """
        images = images_of(self.source, split)
        images = images if count is None else images.first(count)
        return patchify(images.images.double(), self.patch), images.labels

    def model(self) -> VisionTransformer:
        """Return the model at its initial weights; the caller's random state is left alone."""
        if self.folder:
            return model_of(read_run(Path(self.folder)).spec).double()
        images = images_of(self.source)
        tokens = patchify(images.images[:1], self.patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return VisionTransformer(
                tokens.shape[2], tokens.shape[1], images.n_classes, d_model=self.d_model, d_ff=self.d_ff, bias=True,
                n_blocks=self.n_blocks, activation=self.activation, placement=self.placement,
            ).double()  # fmt: skip


@lru_cache(maxsize=2)
def images_of(source: str, split: str = "train") -> ImageDataset:
    """Return the first images of a set, at most :data:`MOST`, with the number of classes of all; read once a process.

    Raises:
        InputError: The set cannot be read.
    """
    images = load_images(source, split=split, dtype=torch.float64 if source == "digits" else torch.float32)
    return images.first(min(len(images), MOST))


def snapshots(out: Path, spec: ImageSpec, steps: Iterable[int]) -> Iterator[tuple[int, VisionTransformer]]:
    """Yield the model after each number of steps, in ascending order; what is kept below ``out/cache`` is not trained again.

    A file that is damaged is set aside, which is said, and made anew.

    Raises:
        InputError: The images or the folder cannot be used.
        KeyboardInterrupt: Training was interrupted.
    """
    tokens, labels = spec.data()
    pixels = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    identity = {"spec": spec, "images": pixels, "made by": code_version(*CODE)}
    folder = out / "cache" / f"digits-{short_digest(identity)}"
    wanted = sorted(set(steps))
    if spec.folder:
        kept = read_run(Path(spec.folder)).models
        for step in wanted:
            model = spec.model()
            if step:
                model.load_state_dict(kept[step])
            yield step, model
        return
    missing = {step for step in wanted if recall(folder / f"{step}.pt", [plain(identity), step]) is NOTHING}
    if missing:
        with differentiable():
            model = spec.model()

            def look(step: int, _: float) -> None:
                if step in missing:
                    keep(folder / f"{step}.pt", [plain(identity), step], model.state_dict())

            look(0, 0.0)
            options: dict[str, Any] = {"batch_size": spec.batch_size, "lr": spec.lr, "seed": spec.seed, "callback": look}
            train(model, tokens, labels, steps=max(missing), **options)
    for step in wanted:
        model = spec.model()
        model.load_state_dict(recall(folder / f"{step}.pt", [plain(identity), step]))
        yield step, model


def classifiers(
    experiment: str, steps: Iterable[int], *, images: str, quick: bool, run: Path | None, seeds: int = 1
) -> tuple[list[ImageSpec], list[int]]:
    """Return the classifiers to measure, one a seed, and the steps: those to train, or the finished runs of a folder.

    Args:
        experiment: Runs that are read.
        steps: Steps of models that are trained.
        images: Images that they are trained on.
        quick: Smaller models.
        run: Folder that ``python -m papers train`` wrote.
        seeds: Number of models that are trained.

    Raises:
        InputError: The folder has no finished run of the experiment.
    """
    if run is None:
        return [replace(ImageSpec.of(images, quick=quick), seed=seed) for seed in range(seeds)], [*steps]
    found = next(iter(arms(experiment, Path(), run=run).values()))
    specs = [
        ImageSpec(one.spec.image[-1], one.spec.d_model, one.spec.d_ff or 4 * one.spec.d_model, one.spec.layers,
                  one.spec.activation, one.spec.placement, one.spec.lr, one.spec.batch_size, one.spec.seed, one.spec.text,
                  str(one.folder))
        for one in found
    ]  # fmt: skip
    return specs, sorted({0, *found[0].models})


def scale_of_images(spec: ImageSpec, seeds: int, steps: int, size: int) -> str:
    """Return the size of image classifiers in words, measured on a batch of ``size`` images after ``steps`` updates."""
    count = sum(p.numel() for p in spec.model().parameters())
    trained = f"{steps} steps of AdamW" if steps else "initial weights"
    return scale(seeds, spec.n_blocks, spec.d_model, count, f"{trained}; measured on {spec.shown(size)}")


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
