"""The figures' command line and the scripts behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from figure_files import read
from figure_sizes import CURVATURE, RUNS

from figures import _digits, accepted, curvature_gap_7_11, names, summary
from figures.__main__ import main
from figures._digits import ImageSpec
from hessiankit.support.errors import InputError


def test_every_script_says_what_it_shows_and_is_drawn_by_a_test() -> None:
    assert {*RUNS, *CURVATURE} == set(names())
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
    assert "text.txt cannot be read" in capsys.readouterr().err


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A file of 50 images of MNIST's size, in which the labels can be seen."""
    labels = np.arange(50) % 10
    images = np.zeros((50, 28, 28), dtype=np.uint8)
    for k, label in enumerate(labels.tolist()):
        images[k, 2 * label : 2 * label + 6, 5:22] = 200
    np.savez(tmp_path / "mnist.npz", images=images, labels=labels)
    return tmp_path / "mnist.npz"


@pytest.mark.slow
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


def test_list_as_a_module_needs_no_toolkit() -> None:
    code = "import sys; from figures.__main__ import main; main(['--list']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[2])
