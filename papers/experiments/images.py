"""Small image sets: scikit-learn's digits, or a ``.npz`` file with arrays ``images`` and ``labels``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hessiankit.cli.study import digits
from hessiankit.cli.study import split as split_by_class
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.tables import sizes

SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False, repr=False)
class ImageDataset:
    """Images in [0, 1] with their labels.

    Attributes:
        images: ``(N, H, W)``, or ``(N, H, W, C)`` in colour.
        labels: ``(N,)`` of whole numbers below ``n_classes``.
        n_classes: Number of classes, the largest label + 1.
        name: Where the images come from.
    """

    images: Tensor
    labels: Tensor
    n_classes: int
    name: str

    def __len__(self) -> int:
        return self.images.shape[0]

    def __repr__(self) -> str:
        size = sizes(self.images.shape[1:])
        return f"ImageDataset({self.name}: {len(self)} images {size}, {self.n_classes} classes)"

    def first(self, count: int) -> ImageDataset:
        """Return the first ``count`` images, for instance as one batch."""
        if not 0 < count <= len(self):
            raise InputError(f"ImageDataset.first: asked for {count} images, {self.name} has {len(self)}; ask for fewer")
        return ImageDataset(self.images[:count], self.labels[:count], self.n_classes, self.name)


def load_images(
    source: str | Path = "digits", *, split: str = "train", seed: int = 0, dtype: torch.dtype = torch.float32
) -> ImageDataset:
    """Return one split of an image set: a fifth of every class is held out, drawn by the seed.

    Args:
        source: ``"digits"`` (1797 images of 8 x 8 pixels, scikit-learn), or the path of a ``.npz`` file with ``images``, bytes
            ``(N, H, W)`` or ``(N, H, W, C)`` or floating numbers from 0 to 1, and ``labels``, whole numbers ``(N,)`` from 0.
        split: ``"train"`` or ``"test"``.
        seed: Of the split.
        dtype: Floating type of the images.

    Raises:
        InputError: The source or the split is unknown, or a file is missing or holds something else.

    >>> load_images("digits", split="test")
    ImageDataset(digits test: 360 images 8 x 8, 10 classes)
    """
    check_name("load_images", "split", split, SPLITS)
    images, labels = digits() if source == "digits" else _read(Path(source).expanduser())
    try:
        rows, classes = split_by_class(images, labels, seed)[SPLITS.index(split)]
    except ValueError as error:
        raise InputError(f"load_images: {source}: cannot hold out a fifth of every class: {error}") from error
    scaled = rows.to(dtype) / 255 if rows.dtype == torch.uint8 else rows.to(dtype)
    return ImageDataset(scaled, classes, int(labels.max()) + 1, f"{Path(source).stem} {split}")


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images and the labels of a ``.npz`` file; objects, which could run code, are not read."""
    if not path.exists():
        raise InputError(
            f"load_images: {str(path)!r} is neither 'digits' nor an existing path; nothing is downloaded, so give a .npz file "
            "with arrays 'images' and 'labels'"
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except Exception as error:  # a damaged archive may raise anything
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"load_images: {path} cannot be read ({why}); expected a .npz file, as numpy.savez writes it") from error
    if missing := {"images", "labels"} - arrays.keys():
        raise InputError(f"load_images: {path} has arrays {sorted(arrays)}, without {sorted(missing)}; expected both")
    images, labels = arrays["images"], arrays["labels"]
    shapes = f"images of {images.dtype} {images.shape}, labels of {labels.dtype} {labels.shape}"
    fits = images.ndim in (3, 4) and labels.shape == images.shape[:1] and labels.size > 0
    numbers = images.dtype == np.uint8 or images.dtype.kind == "f"
    if not (fits and numbers and labels.dtype.kind in "iu" and labels.min() >= 0):
        raise InputError(
            f"load_images: {path} has {shapes}; expected bytes or floating numbers (N, H, W) or (N, H, W, C), and whole numbers "
            "(N,) from 0"
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
