"""Image sets: digits and files give what was written, and a file that holds something else is named for what it is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hessiankit.support.errors import InputError
from papers.experiments.images import load_images

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 6, 4), dtype=np.uint8)
LABELS = np.arange(20) % 4


@pytest.mark.parametrize("colours", [(), (3,)])
def test_a_file_of_bytes(tmp_path: Path, colours: tuple[int, ...]) -> None:
    path, images = tmp_path / "mine.npz", RNG.integers(0, 256, (20, 6, 4, *colours), dtype=np.uint8)
    np.savez_compressed(path, images=images, labels=LABELS.astype(np.uint8))
    train, test = load_images(path), load_images(str(path), split="test")
    assert (len(train), len(test), train.n_classes) == (16, 4, 4)
    assert sorted(test.labels.tolist()) == [0, 1, 2, 3]  # a fifth of every class
    both = torch.cat([train.images, test.images]).flatten(1).double()
    torch.testing.assert_close(both.sum(0), torch.from_numpy(images).flatten(1).double().sum(0) / 255)
    assert train.labels.dtype == torch.long
    assert repr(test) == f"ImageDataset(mine test: 4 images {' x '.join(map(str, (6, 4, *colours)))}, 4 classes)"


def test_numbers_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, images=IMAGES / 512.0, labels=LABELS)
    assert set(load_images(path, dtype=torch.float64).images.flatten().tolist()) <= set((IMAGES / 512.0).ravel().tolist())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, r"has arrays \['images'\], without \['labels'\]"),
        ({"images": IMAGES, "labels": LABELS[:5]}, r"images of uint8 \(20, 6, 4\), labels of int64 \(5,\); expected"),
        ({"images": IMAGES.astype(int), "labels": LABELS}, "images of int64"),
        ({"images": IMAGES, "labels": LABELS - 1}, "whole numbers"),
        ({"images": IMAGES, "labels": np.arange(20)}, "cannot hold out a fifth of every class"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load_images(tmp_path / "mine.npz")


def test_unknown_sources_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="split='validation' is not known"):
        load_images("digits", split="validation")
    with pytest.raises(InputError, match="'mnist' is neither 'digits' nor an existing path; nothing is downloaded"):
        load_images("mnist")
    with pytest.raises(InputError, match="asked for 361 images, digits test has 360"):
        load_images("digits", split="test").first(361)
    for name, content in (("notes.txt", b"hello"), ("pickle", pickle.dumps(print)), ("cut.npz", b"PK\x03\x04")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name} cannot be read .*expected a \.npz file, as numpy\.savez writes it"):
            load_images(tmp_path / name)
