"""The numbers of the Sharpness Disparity figures, recomputed from the models and the runs that they are of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_files import read
from scipy import stats
from torch import Tensor

from figures import _sharpness_runs, script
from figures import sharpness_disparity_1_2_9 as types_and_layers
from figures import sharpness_disparity_4_10_table_2 as comparison
from figures._runs import ByteSpec, byte_run, measured_on, model_of
from figures._sharpness_runs import order_of, specs
from hessiankit.diagnostics.sharpness import report_of, sharpness
from papers.experiments.tuning.experiment import Setting

pytestmark = pytest.mark.slow

NAMES = ("sharpness_disparity_1_2_9", "sharpness_disparity_3_8")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Figures 1, 2, 3, 8 and 9 of two tiny runs."""
    out = tmp_path_factory.mktemp("figures")
    smaller = {"layers": 2, "d_model": 16, "heads": 2, "length": 16, "batch_size": 4, "steps": 40, "every": 20, "windows": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sharpness_runs, "_SMALLER", smaller)
        files = [file for name in NAMES for file in script(name)(out, quick=True)]
        assert len(files) == 11
        assert all(file.stat().st_size for file in files)
        yield out


def exact_diagonal(model: torch.nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher information: the mean over tokens of sum_y p(y) (d log p(y) / d theta)^2, all y in turn."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def logits(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (inputs,)).flatten(0, 1)

    log_p = torch.log_softmax(logits(parameters), 1).detach()
    jacobian = torch.func.jacrev(lambda values: torch.log_softmax(logits(values), 1))(parameters)
    return {name: torch.einsum("ny,ny...->...", log_p.exp(), J.detach() ** 2) / len(log_p) for name, J in jacobian.items()}


def test_the_estimate_of_the_figures_is_that_of_the_exact_fisher_information(tmp_path: Path) -> None:
    spec = ByteSpec(
        "tiny", layers=1, d_model=4, heads=2, length=4, batch_size=2, steps=5, every=0, windows=4, evaluations=1, draws=100
    )  # fmt: skip
    report = types_and_layers.measure(spec, tmp_path)
    assert report.draws == 200
    model = byte_run(spec, tmp_path).model().double()
    ((inputs, _),) = measured_on(spec)
    diagonal = exact_diagonal(model, inputs)
    types = {
        "Emb": ("embedding.",), "QK": ("W_Q", "W_K"), "VO": ("W_V", "W_O"), "FFN": ("W_1", "W_2"), "Norm": ("norm",),
    }  # fmt: skip
    for kind, marks in types.items():
        entries = torch.cat([x.reshape(-1) for name, x in diagonal.items() if any(mark in name for mark in marks)])
        one = report.types[kind]
        assert one.entries == len(entries)
        assert abs(one.value - float(entries.mean())) < 5 * one.standard_error < float(entries.mean()), kind
    assert report.histograms["Norm"].entries == sum(report.histograms["Norm"].counts) + report.histograms["Norm"].zeros


def test_types_and_layers_are_means_over_the_same_entries(drawn: Path) -> None:
    rows = read(drawn / "sharpness_disparity_1_2_9.csv")
    for title in ("GPT-2-like", "LLaMA-like"):
        own = [row for row in rows if row["model"] == title]

        def total(of: str, kind: str | None = None, own: list[dict[str, str]] = own) -> float:
            chosen = [row for row in own if row["of"] == of and kind in (None, row["type"])]
            return math.fsum(float(row["sharpness"]) * int(row["entries"]) for row in chosen)

        for kind in ("QK", "VO", "FFN"):
            assert total("type and layer", kind) == pytest.approx(total("type", kind), rel=1e-4)
        embedding = next(row for row in own if row["of"] == "layer" and row["layer"] == "0")
        of_type = next(row for row in own if row["of"] == "type" and row["type"] == "Emb")
        assert embedding["sharpness"] == of_type["sharpness"]
        assert all(float(row["low"]) <= float(row["sharpness"]) <= float(row["high"]) for row in own)
        counted: dict[str, int] = {}
        for row in read(drawn / "sharpness_disparity_1_2_9_distribution.csv"):
            if row["model"] == title:
                counted[row["type"]] = counted.get(row["type"], 0) + int(row["entries"])
        assert counted == {row["type"]: int(row["entries"]) for row in own if row["of"] == "type"}


def test_norms_and_quotients_are_those_of_the_kept_models(drawn: Path) -> None:
    norms = {
        (r["model"], r["panel"], r["norm_of"], int(r["step"])): float(r["norm"])
        for r in read(drawn / "sharpness_disparity_3_8_norms.csv")
    }
    quotients = {
        (r["model"], r["matrix"], r["of"], int(r["step"])): (float(r["S(gamma)/S(W)"]), float(r["low"]), float(r["high"]))
        for r in read(drawn / "sharpness_disparity_3_8_quotients.csv")
    }
    for title, spec in specs(True).items():
        for step in (0, 20, 40):
            model = byte_run(spec, drawn).model(step)
            blocks = [dict(block.named_parameters()) for block in model.blocks]
            down = np.array([float(block["feedforward.W_2"].detach().norm()) for block in blocks])
            gain = np.array([float(block["norm_2.weight"].detach().norm()) for block in blocks])
            assert norms[title, "FFN", "W_2", step] == pytest.approx(down.mean(), rel=1e-5)
            assert norms[title, "FFN", "gamma", step] == pytest.approx(gain.mean(), rel=1e-5)
            d_ff = blocks[0]["feedforward.W_2"].shape[0] if title == "LLaMA-like" else 64
            assert d_ff in blocks[0]["feedforward.W_2"].shape
            bounds = d_ff * down**2 / gain**2
            value, low, high = quotients[title, "W_2", "bounds", step]
            assert value == pytest.approx(math.sqrt(bounds[0] * bounds[1]), rel=1e-5)
            assert (low, high) == pytest.approx((bounds.min(), bounds.max()), rel=1e-5)
            rows = model.embedding.W_E.detach()[torch.tensor([ord("e"), ord(" "), ord("(")])]
            centred = (rows - rows.mean(1, keepdim=True)).norm(dim=1)
            assert norms[title, "Emb", "smallest row", step] <= float(centred.min()) * (1 + 1e-5)
    (first,) = {key[0] for key in quotients if key[0] == "GPT-2-like"}
    log = byte_run(specs(True)[first], drawn).log
    assert log is not None
    S = log.records[-1]["sharpness"]["tensors"]
    measured = [S[f"blocks.{k}.norm_2.weight"][0] / S[f"blocks.{k}.feedforward.W_1"][0] for k in (0, 1)]
    assert quotients[first, "W_1", "measured", 40][0] == pytest.approx(math.sqrt(measured[0] * measured[1]), rel=1e-5)


def test_the_printed_order_is_said_to_hold_only_where_it_does(drawn: Path) -> None:
    rows = read(drawn / "sharpness_disparity_3_8_sharpness.csv")
    assert {row["model"] for row in rows} == {"GPT-2-like", "LLaMA-like"}
    for row in rows:
        same = {r["type"]: float(r["sharpness"]) for r in rows if (r["model"], r["step"]) == (row["model"], row["step"])}
        rising = [same[kind] for kind in ("Emb", "QK", "FFN", "VO", "Norm")]
        assert row["printed_order"] == str(rising == sorted(rising))


def test_a_step_of_the_order_is_open_where_the_draws_do_not_tell() -> None:
    spec = replace(specs(True)["LLaMA-like"], layers=1, d_model=8, heads=2, length=8, batch_size=2, batches=1)
    report = sharpness(model_of(spec), measured_on(spec), draws=6)
    sizes = torch.tensor([part.size for part in report.replicates.parts]).double()
    of = {"Emb": 1.0, "QK": 2.0, "FFN": 3.0, "VO": 3.0, "Norm": 4.0, "Head": 9.0}
    values = torch.tensor([of[part.type] for part in report.replicates.parts]).double() * sizes
    noise = 1 + 1e-3 * torch.randn(1, 6, len(values), generator=torch.Generator().manual_seed(0)).double()
    made = order_of(report_of(replace(report.replicates, values=values * noise)))
    assert made.steps == ("yes", "yes", "open", "yes")
    turned = torch.tensor([of[part.type] * (100 if part.type == "Emb" else 1) for part in report.replicates.parts]).double()
    found = order_of(report_of(replace(report.replicates, values=turned * sizes * noise)))
    assert (found.steps[0], found.printed) == ("no", False)
    assert found.seen[-1] == "Emb"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("compared")
    setting = Setting(steps=6, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "QUICK", comparison.Protocol(setting, (0.03, 0.06), 3, 2))
        assert len(comparison.draw(out, quick=True)) == 5
        yield out


def test_differences_are_paired_and_have_students_interval(compared: Path) -> None:
    finals: dict[str, dict[str, float]] = {}
    for row in read(compared / "sharpness_disparity_4_10_table_2_curves.csv"):
        finals.setdefault(row["arm"], {})[row["seed"]] = float(row["loss"])  # the last evaluation stays
    table = {row["arm"]: row for row in read(compared / "sharpness_disparity_4_10_table_2.csv")}
    assert set(finals) == set(table)
    baseline = finals["AdamW"]
    for name, losses in finals.items():
        if name == "AdamW" or table[name]["verdict"].startswith("diverged"):
            continue
        differences = np.array([losses[seed] - baseline[seed] for seed in baseline])
        low, high = stats.t.interval(0.95, 2, differences.mean(), stats.sem(differences))
        seen = [float(table[name][key]) for key in ("difference", "difference_low", "difference_high")]
        assert seen == pytest.approx([differences.mean(), low, high], abs=3e-5)


def test_arms_have_the_learning_rates_and_ratios_of_their_names(compared: Path) -> None:
    table = {row["arm"]: row for row in read(compared / "sharpness_disparity_4_10_table_2.csv")}
    chosen = {
        row["ratios"]: float(row["lr"])
        for row in read(compared / "sharpness_disparity_4_10_table_2_searches.csv") if row["chosen"] == "True"
    }  # fmt: skip
    lr = chosen["AdamW"]
    ratios = {name: [float(row[f"ratio_{kind}"]) for kind in ("Emb", "QK", "FFN", "VO", "Norm")] for name, row in table.items()}
    assert ratios["Emb"] == [10, 1, 1, 1, 1]
    assert ratios["Emb, FFN"] == [10, 1, 6, 1, 1]
    assert ratios["Emb, FFN, QK, VO"] == [10, 8, 6, 4, 1]
    assert ratios["Norm x 2"] == [1, 1, 1, 1, 2]
    for name in ("6, 4, 3, 2", "8, 6, 4, 3", "10, 8, 6, 4"):
        assert ratios[f"({name}) at its own lr"] == [*map(float, name.split(",")), 1.0]
        assert float(table[f"({name}) at its own lr"]["lr"]) == chosen[name]
    assert all(float(table[name]["lr"]) == lr for name in ("AdamW", "Emb", "Emb, FFN, QK, VO", "(8, 6, 4, 3) at AdamW's lr"))
    assert float(table["all x 2"]["lr"]) == pytest.approx(2 * lr, rel=5e-3)
    matrices, d = {"Emb": 256 * 8 + 8 * 8, "QK": 2 * 64, "FFN": 2 * 8 * 32, "VO": 2 * 64, "Norm": 6 * 8}, [10, 8, 6, 4, 1]
    uniform = sum(map(math.prod, zip(matrices.values(), d, strict=True))) / sum(matrices.values())
    assert float(table[f"all x {uniform:.2g}"]["lr"]) == pytest.approx(uniform * lr, rel=0.06)


def test_searches_use_other_seeds_than_the_comparison(compared: Path) -> None:
    searched = {row["seed"] for row in read(compared / "sharpness_disparity_4_10_table_2_searches.csv")}
    assert searched == {"1000", "1001"}
    assert {row["seed"] for row in read(compared / "sharpness_disparity_4_10_table_2_curves.csv")} == {"0", "1", "2"}
    lines = (compared / "cache" / "sharpness_disparity_4_10_table_2.jsonl").read_text().splitlines()
    assert len({json.dumps(json.loads(line)["spec"]) for line in lines}) == len(lines)
