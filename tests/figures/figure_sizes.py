"""What the tests of figures share: every figure at the size of a test, and a small language model's run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from figure_files import read

from papers import claims
from papers.experiments.spec import Spec
from papers.experiments.tuning.experiment import Setting

DIGITS = {"d_model": 4, "d_ff": 6}
SIZE = {"layers": 3, "d_model": 8, "heads": 2, "d_ff": 20, "length": 8, "batch_size": 2, "steps": 3, "windows": 4}
LONGER = {**SIZE, "steps": 16}
WIDTHS = {name: SIZE[name] for name in SIZE if name != "layers"}
RUN = Spec(
    "small", layers=1, d_model=8, heads=2, length=8, batch_size=2, steps=12, every=5, windows=4, evaluations=3, lr=0.01, kept=(5,)
)  # fmt: skip
SETTING = Setting(steps=6, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
FOLLOWED = {
    "layers": 2,
    "d_model": 16,
    "heads": 2,
    "length": 16,
    "batch_size": 4,
    "steps": 40,
    "every": 20,
    "windows": 16,
    "kept": (0, 20),
}


@dataclass(frozen=True)
class Small:
    """The ends of the files that a figure writes, and what makes its quick mode a test: attributes of the runs of its experiments,
    and what is patched in its module."""

    files: str
    patches: Callable[[Any], dict[str, Any]] = lambda module: {}
    runs: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "curse_of_depth_2_3_6": Small(".png .csv _angles.csv _verdicts.json", lambda m: {"WINDOWS": 6}, SIZE),
    "curse_of_depth_4_8": Small(".png .csv _laws.csv _verdicts.json", runs=SIZE),
    "curse_of_depth_7": Small(".png .csv _variances.csv _verdicts.json", runs={**SIZE, "layers": 2}),
    "hybridnorm_4_5": Small(
        ".png _losses.csv _differences.csv _gradients.csv _ratios.csv _verdicts.json",
        lambda m: {"QUICK_DEPTHS": (2, 4)},
        LONGER,
    ),
    "hybridnorm_table_3": Small(".png .csv _runs.csv _verdicts.json", lambda m: {"QUICK_SEEDS": (0, 1)}, LONGER),
    "hybridnorm_tables_4_5": Small(".png .csv _verdicts.json", runs=WIDTHS),
    "sharpness_disparity_1_2_9": Small(".csv _distribution.csv _types.png _layers.png _verdicts.json", runs=FOLLOWED),
    "sharpness_disparity_3_8": Small(
        "_sharpness.csv _norms.csv _quotients.csv _sharpness.png _norms.png _verdicts.json", runs=FOLLOWED
    ),
    "sharpness_disparity_4_10_table_2": Small(
        ".csv _searches.csv _curves.csv _verdicts.json .png", lambda m: {"QUICK": m.Protocol(SETTING, (0.03, 0.06), 3, 2)}
    ),
    "sharpness_disparity_6_7_11": Small(
        ".png .csv _sharpness.csv _verdicts.json", lambda m: {"GRID": (0.03, 0.06)}, {**SIZE, "every": 2}
    ),
}
RUNS["trained_arms"] = Small(".png .csv _verdicts.json", runs={"steps": 2, "batch_size": 2, "windows": 4})
CURVATURE = {
    "analytic_minus_empirical": Small(".png .csv .json"),
    "approximations": Small(".png .csv .json _tables.md", lambda m: {"QUICK": m.Settings(("pre",), (0, 1), 4, 4, 6, 2)}),
    "block_diagonal": Small(".png _trend.png .csv"),
    "block_rows": Small(".png .csv"),
    "bounds_by_size": Small(".png .csv .json", lambda m: {"QUICK": m.Settings((2, 3), (1, 2), (3, 4), (1, 2), 1)}),
    "bounds_over_truth": Small(".png .json .md", lambda m: {"QUICK": m.Settings(1, (0, 2), (3,), 1, ("hybridnorm",), 1)}),
    "curvature_gap_3_4": Small(".png .csv _norms_after.png _norms_after.csv _growth.png _growth.csv _verdicts.json"),
    "curvature_gap_5": Small(".png .csv _verdicts.json"),
    "curvature_gap_6_12": Small(
        ".png _test.png .csv _test.csv .json _verdicts.json",
        lambda m: {"measure": lambda out, *_, real=m.measure: real(out, m.ImageSpec(patch=4, **DIGITS), 20, 120, 12, 10, 4)},
    ),
    "curvature_gap_7_11": Small(".png .csv _entries.csv _verdicts.json"),
    "curvature_gap_table_1": Small(
        ".png .csv _norms.csv _verdicts.json", lambda m: {"QUICK": tuple(replace(row, d_model=4, d_ff=6) for row in m.QUICK)}
    ),
    "curvature_gap_theorem_1": Small(".png .csv _verdicts.json"),
    "monitored_adamw": Small(".png .jsonl .json"),
    "monitored_gpt2": Small(".png .jsonl .json", lambda m: {"QUICK": m.Settings(1, 2, 4, 2, 1), "APPROXIMATIONS": ("diagonal",)}),
    "optimizer_curvature": Small(
        ".png .csv .json", lambda m: {"QUICK": m.Settings(4, 1, 4, 2, 4, 2, 2, 16, 4, 0.01, (0,), (300.0,), (3e-3,), 1)}
    ),
    "placement_curvature": Small(
        ".png .csv .json .md", lambda m: {"QUICK": replace(m.QUICK, d_model=4, d_ff=4, tokens=4, sequences=1)}
    ),
    "route_table": Small(".png _errors.png .csv _errors.csv .json", lambda m: {"QUICK": ("layer_norm", "tanh")}),
    "sharpness_coverage": Small(".png .json .md", lambda m: {"QUICK": m.Settings(10, (2, 4), 3, ("classifier",))}),
    "spectrum": Small(".png .csv .json"),
    "vec_r_pictures": Small("_stacking.png _kronecker.png _jacobian.png _second.png _block.png _sum.png .csv"),
}
"""Figures of training runs, and of curvature; the tests of each lie in one file, so that a process draws them once."""


def check_files(name: str, files: dict[str, Path]) -> None:
    """Check that a figure wrote what its entry says, rows and known claims, and no path of this machine."""
    small = {**RUNS, **CURVATURE}[name]
    assert sorted(files) == sorted(small.files.split())
    assert all(path.stat().st_size for path in files.values())
    assert all(read(path) for end, path in files.items() if end.endswith(".csv"))
    known = {row.id for row in claims()}
    for end, path in files.items():
        text = path.read_text() if end.endswith((".json", ".md")) else ""
        assert str(Path(__file__).parents[2]) not in text
        assert not end.endswith("_verdicts.json") or {one["claim"] for one in json.loads(text)} <= known
