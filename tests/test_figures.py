"""The figures' command line and the scripts behind it."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_writers import write_cifar, write_idx
from torch import Tensor, nn

import hessiankit
from figures import _digits, accepted, curse_of_depth_4_8, curvature_gap_7_11, names, summary
from figures.__main__ import main
from figures._depth_models import Size, llama
from figures._digits import ImageSpec, images_of
from figures._runs import model_of
from hessiankit.studies.text import load_text
from hessiankit.support.errors import InputError


def test_every_script_says_what_it_shows() -> None:
    assert "curvature_gap_3_4" in names()
    assert all(summary(name).endswith(".") for name in names())


def test_list_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "curvature_gap_3_4 Figures 3 and 4 of Closing the Curvature Gap" in " ".join(capsys.readouterr().out.split())
    for arguments, message in ((["nothing"], "'nothing' is not known; all"), ([], "name a figure, or pass --all")):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_sources_are_checked_before_anything_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accepted("sharpness_disparity_3_8") == ["text"]
    for arguments, message in (
        (["--images", str(tmp_path / "none")], "there is no such file or folder; nothing is downloaded"),
        (["--text", str(tmp_path)], "curvature_gap_5 has no --text; it is of: curse_of_depth_2_3_6, "),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["curvature_gap_5", *arguments, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("no image")
    assert main(["curvature_gap_5", "--quick", "--images", str(tmp_path / "text.txt"), "--out", str(tmp_path)]) == 1
    assert "neither IDX (plain or gzipped) nor a pickle" in capsys.readouterr().err


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A folder in MNIST's format, 40 images in which the labels can be seen."""
    labels = torch.arange(40, dtype=torch.uint8) % 10
    images = torch.zeros(40, 28, 28, dtype=torch.uint8)
    for k, label in enumerate(labels.tolist()):
        images[k, 2 * label : 2 * label + 6, 5:22] = 200
    folder = tmp_path / "mnist"
    folder.mkdir()
    for split in ("train", "t10k"):
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images.numpy())
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels.numpy())
    return folder


def test_images_from_a_path(mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, quick = ImageSpec.of(str(mnist)), ImageSpec.of(str(mnist), quick=True)
    assert (full.patch, full.data()[0].shape) == (4, (40, 49, 16))  # Table 1's
    assert (quick.patch, quick.shown(32)) == (14, "32 images of mnist train")
    with pytest.raises(InputError, match="asked for 64 images, mnist train has 40"):
        full.data(count=64)
    monkeypatch.setattr(_digits, "QUICK", {"d_model": 4, "d_ff": 6})
    monkeypatch.setattr(curvature_gap_7_11, "FIGURES", {"9: Values": ("attention.W_V",)})
    assert main(["curvature_gap_7_11", "--quick", "--images", str(mnist), "--out", str(tmp_path)]) == 0
    last = next(row for row in read(tmp_path / "curvature_gap_7_11.csv") if row["step"] == "0")
    W = ImageSpec(patch=14, source=str(mnist), d_model=4, d_ff=6).model().blocks[0].attention.W_V
    assert float(last["frobenius"]) == pytest.approx(float(W.detach().norm()), rel=1e-5)


def test_a_colour_image_is_cut_so_that_quick_stays_quick(tmp_path: Path) -> None:
    pixels = torch.arange(6 * 3072).remainder(251).to(torch.uint8).reshape(6, 3072).numpy()
    path = tmp_path / "train"
    write_cifar(path, pixels, [0, 5, 99, 3, 4, 5], "fine_labels")
    spec = ImageSpec.of(str(path), quick=True)
    assert (spec.patch, spec.data()[0].shape, images_of(str(path)).n_classes) == (8, (6, 16, 192), 100)


def test_a_text_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    small = Size(layers=2, d_model=8, heads=2, length=8, batch_size=2, steps=2, windows=4)
    monkeypatch.setattr(curse_of_depth_4_8, "TINY", small)
    assert main(["curse_of_depth_4_8", "--quick", "--text", str(text), "--out", str(tmp_path)]) == 0
    spec = llama("LNS", replace(small, text=str(text)), 1)
    rows = read(tmp_path / "curse_of_depth_4_8.csv")
    first = next(r for r in rows if (r["method"], r["seed"], r["step"], r["output of block"]) == ("LNS", "1", "0", "0"))
    inputs, _ = load_text(text, split="validation").windows(8, 2 * spec.batch_size)
    states = model_of(spec).embedding(inputs)
    assert float(first["variance"]) == pytest.approx(float(states.detach().var(-1, correction=0).mean()), rel=1e-4)


def test_list_as_a_module_needs_no_toolkit() -> None:
    code = "import sys; from figures.__main__ import main; main(['--list']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parent.parent)


def reverse_over_reverse(module: nn.Module, inputs: Tensor, target: Tensor, *, loss: str) -> SimpleNamespace:
    assert loss == "cross_entropy"
    parameters = dict(module.named_parameters())
    value = nn.functional.cross_entropy(module(inputs), target)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(parameters.values()), create_graph=True)])
    directions = torch.eye(len(gradient), dtype=gradient.dtype).split(64)
    rows = [torch.autograd.grad(gradient, list(parameters.values()), d, True, is_grads_batched=True) for d in directions]
    ends = torch.tensor([p.numel() for p in parameters.values()]).cumsum(0).tolist()
    slices = {name: slice(end - p.numel(), end) for (name, p), end in zip(parameters.items(), ends, strict=True)}
    return SimpleNamespace(
        matrix=torch.cat([torch.cat([g.flatten(1) for g in r], 1) for r in rows]), names=list(parameters), slices=slices
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_curvature_gap_3_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed_form = getattr(hessiankit, "hessian", reverse_over_reverse)

    def compared(module: nn.Module, inputs: Tensor, target: Tensor, *, loss: str) -> Any:
        ours, theirs = (compute(module, inputs, target, loss=loss) for compute in (closed_form, reverse_over_reverse))
        assert list(ours.names) == theirs.names
        assert (ours.matrix - theirs.matrix).abs().max() <= 1e-12 * theirs.matrix.abs().max()
        return ours

    monkeypatch.setattr(hessiankit, "hessian", compared, raising=False)
    assert main(["curvature_gap_3_4", "--quick", "--out", str(tmp_path)]) == 0
    stems = [f"curvature_gap_3_4{part}" for part in ("", "_to_scale", "_norms_before", "_norms_after")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["cache", *(f"{s}.{e}" for s in stems for e in ("csv", "png"))])
    assert "validation accuracy" in capsys.readouterr().out
    rows = read(tmp_path / "curvature_gap_3_4.csv")
    assert len(rows) == 2 * 16**2
    assert [row["column"] for row in rows[:16]][-2:] == ["head.W_C", "head.b_C"]
    frobenius: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        frobenius.setdefault((row["row"], row["column"]), []).append(float(row["frobenius"]))
    value = "blocks.0.attention.W_V"
    assert frobenius[value, value][1] > frobenius[value, value][0]
    spectral = {(r["row"], r["column"]): float(r["norm"]) for r in read(tmp_path / "curvature_gap_3_4_norms_after.csv")}
    for pair, (_, norm) in frobenius.items():
        assert spectral[pair] <= norm * (1 + 1e-8)
        assert spectral[pair] == pytest.approx(spectral[pair[::-1]], rel=1e-6)
