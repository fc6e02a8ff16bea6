"""The figure of a monitored GPT-2: training is the same with and without, and the file holds what the picture shows."""

from __future__ import annotations

import json

import pytest

from figures import monitored_gpt2 as figure
from hessiankit.diagnostics.monitoring import Monitor

pytestmark = pytest.mark.slow


def test_the_run_is_the_same_with_and_without(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(figure, "QUICK", figure.Settings(1, 4, 4, 2, 1, None))
    monkeypatch.setattr(figure, "APPROXIMATIONS", ("diagonal",))
    paths = figure.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"monitored_gpt2{end}" for end in (".png", ".jsonl", ".json")]
    about = json.loads(paths[2].read_text())
    assert about["same_parameters"] is True
    log = Monitor.read(paths[1])
    assert about["steps_measured"] == log.steps.tolist() == [0, 1]
    assert set(log.records[-1]["approximations"]["by_name"]) == {"identity", *figure.APPROXIMATIONS}
    assert len(log.records[-1]["spectrum"]["eigenvalues"]) == 4
