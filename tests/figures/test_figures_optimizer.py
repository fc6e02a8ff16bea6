"""The figures of curvature in the optimizer's metric: what warns before a spike, and what fits into a share of the time."""

from __future__ import annotations

import csv
import json

import pytest

from figures import monitored_share, optimizer_curvature


def test_what_warns_before_a_spike(tmp_path):
    paths = optimizer_curvature.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"optimizer_curvature{end}" for end in (".png", ".csv", ".json")]
    about = json.loads(paths[2].read_text())
    assert about["title"] == "1 of 1 runs spiked, and 0 of 1 stable ones"
    for one in about["measures"].values():
        assert one["warned"] <= one["of"] == 1
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"raised", "stable"}
    assert all(float(row["passes"]) <= 10 for row in rows if row["passes"])
    assert {"whole", "FFN"} <= about["types"]["ratios"].keys()


def test_a_warning_is_the_first_value_above_one():
    rows = [{"step": k, "critical": value, "failed": ""} for k, value in enumerate((0.5, 0.9, 1.1, 0.2, None))]
    assert optimizer_curvature.warning({"rows": rows}, "critical") == 2
    assert optimizer_curvature.warning({"rows": rows[3:]}, "critical") == 4  # no multiple at all
    assert optimizer_curvature.warning({"rows": [{**rows[4], "failed": "critical"}]}, "critical") is None


@pytest.mark.slow
def test_a_monitor_with_a_share(tmp_path):
    paths = monitored_share.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"monitored_share{end}" for end in (".png", ".jsonl", ".json")]
    about = json.loads(paths[2].read_text())
    assert about["runs"]["warm"]["steps"][0] == 0
    assert about["runs"]["warm"]["steps"][-1] == 6
