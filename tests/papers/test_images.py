"""Image sets: every source gives what was written, and every damaged file is named for what it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from image_writers import write_cifar, write_idx

from hessiankit.support.errors import InputError
from papers.experiments.images import load_images, one_hot_target, patch_for, patchify

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 6, 4), dtype=np.uint8)
LABELS = np.array([3, 0, 1, 2, 3, 1, 0], dtype=np.uint8)


def mnist(folder: Path, suffix: str = "") -> Path:
    for prefix, count in (("train", 7), ("t10k", 5)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", IMAGES[:count])
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", LABELS[:count])
    return folder


def test_digits_split_is_stratified_disjoint_and_fixed_by_the_seed() -> None:
    train, test = load_images("digits"), load_images("digits", split="test")
    assert (len(train), len(test), train.n_classes, train.image_size) == (1437, 360, 10, (8, 8))
    assert train.images.min() == 0
    assert train.images.max() == 1
    everything = torch.cat([train.images, test.images]).flatten(1).double()
    from sklearn.datasets import load_digits

    original = torch.from_numpy(load_digits().data) / 16
    assert sorted(everything.tolist()) == sorted(original.tolist())
    fractions = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    assert fractions.sub(0.2).abs().max() < 0.01
    assert torch.equal(load_images("digits").images, train.images)
    assert not torch.equal(load_images("digits", seed=1).images, train.images)


def test_first_is_one_batch_and_refuses_more_than_there_is() -> None:
    test = load_images("digits", split="test", dtype=torch.float64)
    batch = test.first(3)
    assert batch.images.dtype == torch.float64
    assert torch.equal(batch.labels, test.labels[:3])
    with pytest.raises(InputError, match="asked for 361 images, digits test has 360"):
        test.first(361)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_mnist_folder(tmp_path: Path, suffix: str, place: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    mnist(tmp_path / place, suffix)
    train, test = load_images(tmp_path), load_images(str(tmp_path), split="test")
    assert torch.equal(train.images, torch.from_numpy(IMAGES).float() / 255)
    assert train.labels.tolist() == LABELS.tolist()
    assert train.labels.dtype == torch.long
    assert (train.n_classes, len(test)) == (4, 5)


def test_mnist_file_reads_the_labels_beside_it(tmp_path: Path) -> None:
    mnist(tmp_path, ".gz")
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    assert len(load_images(file, split="test")) == 5
    with pytest.raises(InputError, match="pass split='test'"):
        load_images(file)
    with pytest.raises(InputError, match="does not name an image file"):
        load_images(tmp_path / "train-labels-idx1-ubyte.gz")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match="no label file beside it; expected t10k-labels-idx1-ubyte"):
        load_images(file, split="test")


def test_mnist_counts_have_to_agree(tmp_path: Path) -> None:
    mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS[:6])
    with pytest.raises(InputError, match=r"7 images in .* but 6 labels"):
        load_images(tmp_path)


def test_cifar_100_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = RNG.integers(0, 256, (3, 3072), dtype=np.uint8)
    write_cifar(folder / "train", pixels, [99, 0, 7], "fine_labels")
    write_cifar(folder / "test", pixels[:1], [5], "fine_labels")
    for source in (tmp_path, folder, folder / "train"):
        train = load_images(source)
        assert (tuple(train.images.shape), train.n_classes, train.labels.tolist()) == ((3, 32, 32, 3), 100, [99, 0, 7])
        assert train.images[1, 4, 9, 2].item() == pytest.approx(pixels[1, 2 * 1024 + 4 * 32 + 9] / 255)
    assert load_images(folder, split="test").labels.tolist() == [5]
    assert repr(train) == "ImageDataset(CIFAR-100 train: 3 images 32 x 32 x 3, 100 classes)"


def test_cifar_10_folder_joins_its_five_batches(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (10, 3072), dtype=np.uint8)
    for k in range(5):
        write_cifar(tmp_path / f"data_batch_{k + 1}", pixels[2 * k : 2 * k + 2], [k, 9 - k], "labels")
    train = load_images(tmp_path)
    assert (train.n_classes, train.labels.tolist()) == (10, [0, 9, 1, 8, 2, 7, 3, 6, 4, 5])
    with pytest.raises(InputError, match="lacks test_batch"):
        load_images(tmp_path, split="test")
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(InputError, match="lacks data_batch_3"):
        load_images(tmp_path)


def test_two_cifar_sets_in_one_folder_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("cifar-100-python", "cifar-10-batches-py"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="holds both cifar-100-python and cifar-10-batches-py"):
        load_images(tmp_path)


def test_unknown_sources_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="split='validation' is not known"):
        load_images("digits", split="validation")
    with pytest.raises(InputError, match="'mnist' is neither 'digits' nor an existing path; nothing is downloaded"):
        load_images("mnist")
    with pytest.raises(InputError, match="seen nothing"):
        load_images(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"seen notes\.txt; expected t10k-images-idx3-ubyte"):
        load_images(tmp_path, split="test")
    with pytest.raises(InputError, match="neither IDX"):
        load_images(tmp_path / "notes.txt")
    write_cifar(tmp_path / "train", np.zeros((0, 3072), dtype=np.uint8), [], "fine_labels", protocol=4)
    with pytest.raises(InputError, match="holds no images"):
        load_images(tmp_path)


def test_a_hostile_pickle_in_a_cifar_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(pickle.dumps(print))
    with pytest.raises(InputError, match=r"builtins\.print.*could run code"):
        load_images(tmp_path)


def test_patchify_against_explicit_loops() -> None:
    images = torch.randn(2, 6, 4, 3)
    patches = patchify(images, 2)
    assert patches.shape == (2, 6, 12)
    for row in range(3):
        for column in range(2):
            expected = images[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 2 * row + column], expected.reshape(2, 12))
    assert torch.equal(patchify(images[..., 0], 2), patches[..., ::3])
    with pytest.raises(InputError, match="patches of side 3 do not tile 6 x 4 images; choose one of 1, 2"):
        patchify(images, 3)
    with pytest.raises(InputError, match="expected \\(N, H, W\\)"):
        patchify(images[0, 0], 2)


def test_patch_for_gives_the_asked_number_of_tokens_or_the_choice() -> None:
    for seq_len in (1, 4, 16, 64):
        assert patchify(torch.zeros(1, 8, 8), patch_for(8, seq_len)).shape[1] == seq_len
    assert patch_for((6, 4), 6) == 2
    with pytest.raises(InputError, match="8 x 8 image into 10 tokens; choose one of 1, 4, 16, 64"):
        patch_for((8, 8), 10)


def test_one_hot_target() -> None:
    labels = torch.tensor([2, 0, 1], dtype=torch.uint8)
    assert torch.equal(one_hot_target(labels, 3, torch.float64), torch.eye(3, dtype=torch.float64)[[2, 0, 1]])
    with pytest.raises(InputError, match="labels run from 0 to 2, expected 0 to 1"):
        one_hot_target(labels, 2)
    with pytest.raises(InputError, match="expected whole numbers"):
        one_hot_target(labels.float(), 3)
