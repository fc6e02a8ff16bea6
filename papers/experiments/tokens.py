"""Data of training runs: the standard library's bytes, folders of tokenised shards, parquet files, and images."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hessiankit.cli.study import patchify
from hessiankit.support.errors import InputError
from papers.experiments.images import load_images
from papers.experiments.spec import Spec
from papers.experiments.tuning.experiment import digest_of, texts

SAMPLE = 1 << 20
"""Tokens of a shard that its digest and the check of the vocabulary read: reading all of 10^12 would take a day."""


class Shards:
    """Tokens of files, mapped and never read as a whole.

    Args:
        arrays: Whole numbers (N,), one array a file.
        name: Source, for errors.
    """

    def __init__(self, arrays: list[np.ndarray], name: str) -> None:
        self.arrays, self.name = arrays, name
        self.ends = np.cumsum([len(array) for array in arrays])
        self.largest = max((int(array[:SAMPLE].max()) for array in arrays if len(array)), default=0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def tokens(self) -> Tensor:
        """The first :data:`SAMPLE` tokens, for what asks which of them occur."""
        return torch.from_numpy(self.arrays[0][:SAMPLE].astype(np.int64))

    @property
    def digest(self) -> str:
        """The first 16 digits of a SHA-256 of the lengths and of the first :data:`SAMPLE` tokens of each file."""
        content = hashlib.sha256(str(self.ends.tolist()).encode())
        for array in self.arrays:
            content.update(np.ascontiguousarray(array[:SAMPLE]).tobytes())
        return content.hexdigest()[:16]

    def batch(self, batch_size: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return random windows as inputs and next tokens, both ``(batch_size, length)``."""
        return self._at(torch.randint(len(self) - length, (batch_size,), generator=generator).tolist(), length)

    def windows(self, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` fixed windows, spread evenly from the first token to the last.

        >>> inputs, targets = Shards([np.arange(6), np.arange(6, 12)], "twelve").windows(2, 3)
        >>> inputs.tolist(), targets[-1].tolist()
        ([[0, 1], [3, 4], [9, 10]], [10, 11])
        """
        last = len(self) - length - 1
        return self._at([k * last // max(count - 1, 1) for k in range(count)], length)

    def _at(self, starts: list[int], length: int) -> tuple[Tensor, Tensor]:
        rows = []
        for start in starts:
            k = int(np.searchsorted(self.ends, start, side="right"))
            array, first = self.arrays[k], int(self.ends[k] - len(self.arrays[k]))
            if len(array) <= length:
                raise InputError(f"train: {self.name}: a file has {len(array)} tokens; a window takes {length + 1}")
            at = min(start - first, len(array) - length - 1)  # a window ends with its file
            rows.append(torch.from_numpy(array[at : at + length + 1].astype(np.int64)))
        tokens = torch.stack(rows)
        return tokens[:, :-1], tokens[:, 1:]


class Images:
    """Patches of images with their classes.

    Args:
        source: ``"digits"``, or a path that ``papers.experiments.images.load_images`` reads.
        split: ``"train"`` or ``"test"``.
        patch: Side of a patch.
    """

    def __init__(self, source: str, split: str, patch: int) -> None:
        images = load_images(source, split=split)
        self.tokens, self.labels, self.largest = patchify(images.images, patch), images.labels, images.n_classes - 1
        self.image = (*images.images.shape[1:3], images.images.shape[3] if images.images.ndim == 4 else 1, patch)
        self.digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]

    def batch(self, batch_size: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return random images and their classes."""
        rows = torch.randint(len(self.labels), (batch_size,), generator=generator)
        return self.tokens[rows], self.labels[rows]

    def windows(self, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the first images and their classes."""
        return self.tokens[:count], self.labels[:count]


@lru_cache(maxsize=2)
def shards_of(source: str) -> tuple[Shards, Shards] | None:
    """Return both splits of a folder of tokenised files: held out are those whose names begin with "val", or the last one.

    ``.bin`` files hold 16-bit whole numbers and nothing else, as nanoGPT writes them; ``.parquet`` files have a column
    ``input_ids`` and need Hugging Face's ``datasets``. None where there are neither: a text.

    Raises:
        InputError: There is one file only, or ``datasets`` is missing.
    """
    folder = Path(source).expanduser()
    files = sorted([*folder.glob("*.bin"), *folder.glob("*.parquet")]) if folder.is_dir() else []
    if not files:
        return None
    held_out = [file for file in files if file.name.startswith("val")] or files[-1:]
    train = [file for file in files if file not in held_out]
    if not train:
        raise InputError(f"train: {source} has one file of tokens; expected a second, named val*, that is held out")
    return Shards([_mapped(file) for file in train], source), Shards([_mapped(file) for file in held_out], source)


def _mapped(file: Path) -> np.ndarray:
    if file.suffix == ".bin":
        return np.memmap(file, np.uint16, "r")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(f"train: {file} is read by datasets, which is not installed; pip install datasets") from error
    column = load_dataset("parquet", data_files=str(file), split="train").with_format("numpy")["input_ids"]
    return np.concatenate([np.asarray(row, dtype=np.uint32) for row in column])


def data_of(spec: Spec) -> tuple[Any, Any]:
    """Return the training data of a run and the held-out data, with ``batch(batch_size, length, generator)`` and ``windows``.

    Raises:
        InputError: The source cannot be read, or has tokens or images that the model does not take.
    """
    if spec.image:
        both: Any = Images(spec.text, "train", spec.image[-1]), Images(spec.text, "test", spec.image[-1])
        if both[0].image != spec.image:
            raise InputError(f"train: {spec.text} has images of {both[0].image[:3]}; {spec.name} takes {spec.image[:3]}")
        largest = both[0].largest
    else:
        shards = shards_of(spec.text)
        if shards is None:
            return texts(spec.text)
        both, largest = shards, max(one.largest for one in shards)
    if largest >= spec.vocabulary:
        raise InputError(f"train: {spec.text} has the token or class {largest}; {spec.name} has {spec.vocabulary} of them")
    return both


def data_digest(spec: Spec) -> str:
    """Return the digests of both splits."""
    if not spec.image and shards_of(spec.text) is None:
        return digest_of(spec.text)
    return "-".join(one.digest for one in data_of(spec))


def fitted(spec: Spec, source: str) -> Spec:
    """Return the run on data of another size: its vocabulary grows to that of the tokens, its image to that of the file.

    Raises:
        InputError: The data cannot be read.
    """
    spec = replace(spec, text=source)
    if not spec.image:
        shards = shards_of(source)
        return spec if shards is None else replace(spec, vocabulary=max(spec.vocabulary, *(one.largest + 1 for one in shards)))
    images = load_images(source)
    patch = spec.image[-1] if images.images.shape[1] < 16 else 4  # of MNIST and CIFAR-100 in Closing the Curvature Gap
    data = Images(source, "train", patch)
    return replace(spec, image=data.image, length=data.tokens.shape[1], vocabulary=images.n_classes)
