"""Text as bytes: which files, how they are split, and which windows a model reads."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from hessiankit.cli.text import HELD_OUT, STDLIB_EXCLUDED, TextDataset, load_text
from hessiankit.support.errors import InputError

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def folder_of(tmp_path: Path, names: list[str]) -> Path:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    return tmp_path


def test_standard_library_split_by_file():
    train, validation = load_text(), load_text(split="validation")
    assert not set(train.files) & set(validation.files)
    assert {"json/decoder.py", "this.py"} <= set(train.files) | set(validation.files)
    assert b"".join((STDLIB / name).read_bytes() for name in train.files) == train.tokens.numpy().tobytes()
    folders = {part for name in train.files + validation.files for part in Path(name).parent.parts}
    assert not folders & set(STDLIB_EXCLUDED)


def test_a_file_stays_where_it_is_when_others_come(tmp_path):
    few, many = [f"a{k}.txt" for k in range(0, 240, 2)], [f"a{k}.txt" for k in range(240)]
    before = load_text(folder_of(tmp_path / "few", few), split="validation").files
    after = load_text(folder_of(tmp_path / "many", many), split="validation").files
    assert set(before) == set(after) & set(few)
    assert after == tuple(sorted(after)) != load_text(tmp_path / "many", split="validation", seed=1).files
    assert abs(len(after) / 240 - HELD_OUT) < 4 * (HELD_OUT * (1 - HELD_OUT) / 240) ** 0.5  # four standard deviations


def test_folder_skips_hidden_and_binary_files(tmp_path):
    folder = folder_of(tmp_path, [f"{k}.txt" for k in range(40)] + ["sub/deep/x.md", ".hidden", ".git/config"])
    (folder / "picture.bin").write_bytes(b"\x89\0\1")
    found = load_text(folder).files + load_text(folder, split="validation").files
    assert sorted(found) == sorted([f"{k}.txt" for k in range(40)] + ["sub/deep/x.md"])


def test_one_file_is_cut(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(100)))
    assert load_text(path).tokens.tolist() == list(range(90))
    assert load_text(path, split="validation").tokens.tolist() == list(range(90, 100))
    assert repr(load_text(path)) == "TextDataset(book.txt train: 1 files, 90 bytes)"


def test_batch_is_windows_shifted_by_one():
    text = TextDataset(torch.arange(200, dtype=torch.uint8), ("x",), "x")
    inputs, targets = text.batch(64, 5, seeded())
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (64, 5)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(5))
    assert torch.equal(inputs, text.batch(64, 5, seeded())[0])
    assert not torch.equal(inputs, text.batch(64, 5, seeded(1))[0])
    assert inputs[:, 0].min() < 10
    assert targets.max() > 190


def test_windows_are_fixed_and_reach_both_ends():
    text = TextDataset(torch.arange(100, dtype=torch.uint8), ("x",), "x")
    inputs, targets = text.windows(8, 5)
    assert (inputs[0, 0], targets[-1, -1]) == (0, 99)
    assert torch.equal(inputs, text.windows(8, 5)[0])
    assert inputs[:, 0].diff().tolist() == [22, 23, 23, 23]
    assert text.windows(8, 1)[0].tolist() == [list(range(8))]


def test_errors(tmp_path):
    with pytest.raises(InputError, match="neither 'stdlib' nor an existing path"):
        load_text(tmp_path / "missing")
    with pytest.raises(InputError, match="none with text falls to 'validation'"):
        load_text(folder_of(tmp_path, ["a0.txt"]), split="validation")
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InputError, match="leaves none for 'validation'"):
        load_text(tmp_path / "short.txt", split="validation")
    text = load_text(tmp_path / "short.txt")
    with pytest.raises(InputError, match="needs 4 bytes, and short"):
        text.batch(1, 3)
    with pytest.raises(InputError, match="asked for 0 windows of 2"):
        text.windows(2, 0)
