"""The demonstration: the exact Hessian of a classifier of digits, checked before and after training."""

from __future__ import annotations

import dataclasses
import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hessiankit.cli.main import main
from hessiankit.cli.study import digits, patchify, split
from hessiankit.support.errors import InputError
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import CheckRow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hessiankit.cli.study.QUICK", {"d_model": 4, "d_ff": 5, "patch": 4, "steps": 20, "batch": 2})


REPORTS: list[CheckReport] = []


@pytest.fixture
def one_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of one loss, whose Hessians are one, and wrong."""
    wrong = CheckRow("head.W_C x head.W_C", "made up", 1.0, passed=False, seconds=0.0)

    def once(*data: Any, **options: Any) -> CheckReport:
        if not REPORTS:
            REPORTS.append(dataclasses.replace(check(*data, **options), rows=(wrong,)))
        return REPORTS[0]

    monkeypatch.setattr(sys.modules["hessiankit.verify.check"], "check", once)
    monkeypatch.setattr("hessiankit.cli.study.LOSS_NAMES", {"mse": "squared error"})


@pytest.mark.usefixtures("one_disagreement", "few_pixels")
def test_disagreement_is_exit_code_one(tmp_path: Path) -> None:
    assert main(["study", "--quick", "--out", str(tmp_path)]) == 1


@pytest.mark.usefixtures("one_disagreement", "few_pixels")
def test_numbers_are_written_before_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if ".png" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["study", "--quick", "--out", str(tmp_path)]) == 2
    assert "hessian_mse.png: No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_without_scikit_learn_the_error_names_the_extra(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["study", "--quick", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hessiankit: study: the digits need scikit-learn")
    assert said.endswith("pip install 'hessiankit[study]'\n")


def test_the_split_is_stratified_disjoint_and_fixed_by_the_seed() -> None:
    images, labels = digits()
    assert (images.shape, images.min(), images.max()) == ((1797, 8, 8), 0, 1)
    (train, train_labels), (held_out, held_out_labels) = split(images, labels)
    assert (len(train), len(held_out)) == (1437, 360)
    assert sorted(torch.cat([train, held_out]).flatten(1).tolist()) == sorted(images.flatten(1).tolist())
    fractions = torch.bincount(held_out_labels) / torch.bincount(labels)
    assert fractions.sub(0.2).abs().max() < 0.01
    assert torch.equal(split(images, labels)[0][1], train_labels)
    assert not torch.equal(split(images, labels, 1)[0][0], train)


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
