"""Verdicts of figures: their status from outcomes and intervals, under the picture, and in the ledger."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import papers
from figures._kit import page, save, style, write_verdicts
from figures._verdicts import Part, Status, Verdict, above_zero, in_every
from hessiankit.support.errors import InputError
from papers.experiments.tuning.verdict import mean_interval

ROOT = Path(__file__).parents[2]
STATUSES = {"SUPPORTED", "CONTRADICTED", "OPEN"}


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [
        (("SUPPORTED", "SUPPORTED"), "SUPPORTED"),
        (("SUPPORTED", "OPEN"), "OPEN"),
        (("OPEN", "CONTRADICTED"), "CONTRADICTED"),
        (("SUPPORTED", "CONTRADICTED"), "CONTRADICTED"),
        ((), "OPEN"),
    ],
)
def test_a_claim_is_as_good_as_its_parts(statuses: tuple[Status, ...], whole: str) -> None:
    assert Verdict("hybridnorm/fig4", "", tuple(Part("", status, "") for status in statuses)).status == whole


def test_an_interval_decides_only_where_it_lies_on_one_side() -> None:
    above, below, around = (mean_interval(x) for x in ([1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.1, 0.9]))
    assert [above_zero("", one).status for one in (above, below, around)] == ["SUPPORTED", "CONTRADICTED", "OPEN"]
    assert [above_zero("", some).status for some in ([above, around], [], [above, below])] == ["OPEN", "OPEN", "CONTRADICTED"]
    assert [in_every("", some, "").status for some in ([True], [True, False], [False])] == ["SUPPORTED", "OPEN", "CONTRADICTED"]
    with pytest.raises(InputError, match="no run for the criterion 'lower loss'"):
        in_every("lower loss", [], "")


@pytest.mark.usefixtures("all_pixels")
def test_the_verdicts_are_under_the_picture_and_beside_it(tmp_path: Path) -> None:
    verdict = Verdict("curse-of-depth/fig6", "2 seeds", (in_every("a long criterion " * 20, [True, False], "0.1, 0.2"),))

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
        write_verdicts(tmp_path, "b", [Verdict("curse-of-depth/fig99", "", ())])


def test_what_the_ledger_reads_is_what_the_figures_wrote() -> None:
    gallery = runpy.run_path(str(ROOT / "docs" / "_site" / "gallery.py"))
    kept = json.loads((ROOT / "papers" / "small_scale.json").read_text())
    assert kept == gallery["small_scale"](), "run: python docs/_site/gallery.py"
    assert {one["verdict"] for one in kept.values()} <= STATUSES
    ids = {row.id for row in papers.claims()}
    said = gallery["verdicts"]()
    assert {one["claim"] for each in said.values() for one in each} <= ids
    drawn = {path.name for path in (ROOT / "docs" / "gallery").glob("*.png")}
    assert all(any(picture.startswith(name) for picture in drawn) for name in said)
