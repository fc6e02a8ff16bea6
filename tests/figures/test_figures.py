"""The figures' command line, the scripts behind it, and what they share: kept answers, interrupted sessions, verdicts."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from figure_files import WITHOUT_PICTURES, read
from figure_sizes import CURVATURE, RUN, RUNS
from PIL import Image

import papers
from figures import __main__ as command
from figures import _digits, _kit, _session, accepted, curvature_gap_7_11, names, summary
from figures.__main__ import main
from figures._digits import ImageSpec
from figures._kit import cached, page, save, style, write_verdicts
from figures._verdicts import Part, Status, Verdict, above_zero, in_every, unreached
from hessiankit.support.errors import InputError
from papers.experiments.runs import kept_run
from papers.experiments.store import NOTHING, keep, recall
from papers.experiments.tuning.experiment import RunSpec, Setting, run
from papers.experiments.tuning.verdict import mean_interval


def test_every_script_says_what_it_shows_and_is_drawn_by_a_test() -> None:
    assert {*RUNS, *CURVATURE} == set(names())
    assert all(summary(name).endswith(".") for name in names())


def test_list_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "curvature_gap_3_4 Figures 3 and 4 of Closing the Curvature Gap" in " ".join(capsys.readouterr().out.split())
    for arguments, message in ((["nothing"], "'nothing' is not known; all"), ([], "name a figure, or pass --all")):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_sources_are_checked_before_anything_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accepted("sharpness_disparity_3_8") == ["text", "run"]
    for arguments, message in (
        (["--images", str(tmp_path / "none")], "there is no such file or folder; nothing is downloaded"),
        (["--text", str(tmp_path)], "curvature_gap_5 has no --text; it is of: curse_of_depth_2_3_6, "),
    ):
        assert main(["curvature_gap_5", *arguments, "--out", str(tmp_path)]) == 2
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


# Kept answers, of which damaged ones are made anew, and sessions that are interrupted ---------------------------------


def test_an_answer_is_kept_until_its_key_or_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"made": len(made), "pair": (1, 2)}

    first = cached(tmp_path, "x", RUN, make)
    assert first == cached(tmp_path, "x", RUN, make) == {"made": 1, "pair": [1, 2]}
    assert cached(tmp_path, "x", replace(RUN, seed=1), make)["made"] == 2
    monkeypatch.setattr(_kit, "code_version", lambda *names: "other code")
    assert cached(tmp_path, "x", RUN, make)["made"] == 3


def test_a_run_is_that_of_tune_lr(tmp_path: Path) -> None:
    setting = Setting(steps=12, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
    found, reference = kept_run(RUN, tmp_path), run(RunSpec(setting, 0.01))
    assert found.steps == reference.steps == (0, 4, 8, 12)
    assert found.losses == reference.losses
    assert len(found.train_losses) == 12


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-9],
    "one bit": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "other content": lambda content: b"[1, 2]",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_answer_is_set_aside_and_made_anew(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
    (path,) = tmp_path.glob("cache/*")
    damaged = DAMAGE[how](path.read_bytes())
    path.write_bytes(damaged)
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
    said = capsys.readouterr().err
    assert said.startswith(f"experiments: {path} is damaged: ")
    assert said.endswith(f"; it is now {path.name}.damaged, and is made anew\n")
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 1 / 0) == 6


def test_an_answer_to_another_question_is_set_aside_where_its_name_is_of_one_alone(tmp_path: Path) -> None:
    keep(tmp_path / "a.pt", {"n": 4}, 7)
    assert recall(tmp_path / "a.pt", {"n": 3}, exclusive=False) is NOTHING
    assert recall(tmp_path / "a.pt", {"n": 4}) == 7
    assert recall(tmp_path / "a.pt", {"n": 3}) is NOTHING
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.damaged"]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Path], list[Path]]]:
    """Three figures that write an empty file each, to be replaced by the test."""

    def writing(name: str) -> Callable[[Path], list[Path]]:
        def draw(out: Path) -> list[Path]:
            (out / f"{name}.png").touch()
            return [out / f"{name}.png"]

        return draw

    draws = {name: writing(name) for name in ("one", "three", "two")}
    monkeypatch.setattr(command, "names", lambda: sorted(draws))
    monkeypatch.setattr(command, "summary", lambda name: f"Shows {name}.")
    monkeypatch.setattr(command, "script", lambda name: lambda out, quick, suffix: draws[name](out))
    monkeypatch.setattr(_session, "code_version", lambda *names: "code")
    return draws


def raising(error: BaseException) -> Callable[[Path], list[Path]]:
    def draw(out: Path) -> list[Path]:
        raise error

    return draw


def test_one_that_fails_is_named_and_the_others_are_drawn(
    three: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = three["three"]
    three["three"] = raising(InputError("a text: not there"))
    assert command.main(["--all", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "drawn: 2 of 3" in out
    assert err.endswith("failed: three: a text: not there\n")
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.glob("*.png")} == {"one.png", "two.png"}
    three["three"], three["one"] = mended, raising(AssertionError("drawn again"))
    assert command.main(["--all", "--out", str(tmp_path)]) == 0
    assert "one: drawn before the interruption" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "three.png", "two.png"]
    assert command.main(["--all", "--out", str(tmp_path)]) == 1  # all were drawn: this is a new session, in which one fails
    assert capsys.readouterr().err.endswith("failed: one: AssertionError: drawn again\n")


def test_the_same_command_goes_on_after_ctrl_c(three: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mended, asked = three["three"], ["--all", "--out", str(tmp_path)]
    three["three"] = raising(KeyboardInterrupt())
    assert command.main(asked) == 130
    assert "goes on with three, two" in capsys.readouterr().err
    three["three"] = mended
    (tmp_path / "one.png").unlink()  # a file that is gone is drawn again
    assert command.main(asked) == 0
    assert "drawn before" not in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "three.png", "two.png"]


# Verdicts: their status from outcomes and intervals, under the picture, and in the ledger -----------------------------

ROOT = Path(__file__).parents[2]
SEEN, SMALLER, PART, NOT, OPEN = get_args(Status)


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [
        ((SEEN, SEEN), SEEN),
        ((SEEN, SMALLER), SMALLER),
        ((SEEN, OPEN), PART),
        ((SMALLER, NOT), PART),
        ((OPEN, NOT), NOT),
        ((OPEN, OPEN), OPEN),
        ((), OPEN),
    ],
)
def test_a_claim_is_as_good_as_its_parts(statuses: tuple[Status, ...], whole: str) -> None:
    assert Verdict("hybridnorm/fig4", "", "", tuple(Part("", status, "") for status in statuses)).status == whole


def test_an_interval_decides_only_where_it_lies_on_one_side() -> None:
    above, below, around = (mean_interval(x) for x in ([1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.1, 0.9]))
    assert [above_zero("", one).status for one in (above, below, around)] == [SEEN, NOT, OPEN]
    assert [above_zero("", some).status for some in ([above, around], [], [above, below])] == [OPEN, OPEN, NOT]
    assert [in_every("", some, "").status for some in ([True], [True, False], [False])] == [SEEN, OPEN, NOT]
    with pytest.raises(InputError, match="no run for the criterion 'lower loss'"):
        in_every("lower loss", [], "")


def test_a_criterion_out_of_reach_can_be_met_and_not_failed() -> None:
    missing = unreached(steps=(400, 10_000), vocabulary=(60_000, 50_304))
    assert missing == "steps: 400 here, 10 000 in print"
    assert unreached(steps=(10_000, 10_000)) == ""
    below = mean_interval([-1.0, -1.1, -0.9])
    failed = [in_every("lower", [False, False], "2.3", missing), above_zero("lower", below, missing=missing)]
    assert [part.status for part in failed] == [OPEN, OPEN]
    assert failed[0].text == "lower: not reached at this size, steps: 400 here, 10 000 in print (2.3)"
    assert in_every("lower", [True, True], "2.1", missing).status == SEEN
    caption = Verdict("curse-of-depth/fig6", "deep blocks matter more", "2 seeds", (failed[0],)).caption
    assert caption.endswith("deep blocks matter more. Open (steps: 400 here, 10 000 in print). 2 seeds.")


def test_an_effect_below_the_printed_one_keeps_its_direction() -> None:
    assert in_every("7 times", [False, False], "", direction=[True, True]).status == SMALLER
    assert in_every("7 times", [False, False], "", direction=[True, False]).status == NOT
    assert in_every("7 times", [True, True], "", direction=[True, True]).status == SEEN


@pytest.mark.usefixtures("all_pixels")
def test_the_verdicts_are_under_the_picture_and_beside_it(tmp_path: Path) -> None:
    verdict = Verdict("curse-of-depth/fig6", "a long claim " * 20, "2 seeds", (in_every("lower", [True, False], "0.1, 0.2"),))

    def drawn(name: str, verdicts: tuple[Verdict, ...]) -> np.ndarray:
        with style():
            figure = page(6.5, 1.0)
            figure.add_subplot().plot([0, 1], [0, 1])
            return np.asarray(Image.open(save(figure, tmp_path / name, verdicts)).convert("L"))

    bare, said = drawn("a.png", ()), drawn("b.png", (verdict,))
    assert said.shape[1] == bare.shape[1]
    assert np.abs(said[: len(bare) - 4].astype(int) - bare[:-4]).mean() < 2  # the palette differs
    below = said[len(bare) :]
    assert len(below) > 40
    assert (below < 100).any()
    assert (below[:, -12:] > 200).all(), "a line is longer than the picture is wide"
    (kept,) = json.loads(write_verdicts(tmp_path, "b", [verdict]).read_text())
    assert kept["status"] == "OPEN"
    assert kept["statement"] == papers.claims(id="curse-of-depth/fig6")[0].statement
    with pytest.raises(InputError, match="curse-of-depth/fig99"):
        write_verdicts(tmp_path, "b", [Verdict("curse-of-depth/fig99", "", "", ())])


def test_what_the_ledger_reads_is_what_the_figures_wrote() -> None:
    gallery = runpy.run_path(str(ROOT / "docs" / "_site" / "gallery.py"))
    kept = json.loads((ROOT / "papers" / "small_scale.json").read_text())
    assert kept == gallery["small_scale"](), "run: python docs/_site/gallery.py"
    assert {one["verdict"] for one in kept.values()} <= set(get_args(Status))
    ids = {row.id for row in papers.claims()}
    said = gallery["verdicts"]()
    assert {one["claim"] for each in said.values() for one in each} <= ids
    drawn = {path.name for path in (ROOT / "docs" / "gallery").glob("*.png")}
    assert WITHOUT_PICTURES or all(any(picture.startswith(name) for picture in drawn) for name in said)
