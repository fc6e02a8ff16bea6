"""Figures of training runs: their numbers, recomputed from the models by other routes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from figure_files import read
from figure_sizes import FOLLOWED, LONGER, RUNS, SIZE, check_files
from scipy import stats
from torch import Tensor, nn

from figures import sharpness_disparity_1_2_9
from figures.__main__ import main
from hessiankit.blocks import Transformer
from hessiankit.cli.text import load_text
from papers.experiments.catalogue import specs
from papers.experiments.optimizers import AdamMini, Lion
from papers.experiments.runs import kept_run, measured_on, read_run, train_run
from papers.experiments.spec import Spec, model_of

TINY = Spec(
    "tiny", layers=1, d_model=4, heads=2, length=4, batch_size=2, steps=5, every=0, windows=4, evaluations=1, draws=100
)  # fmt: skip


def spec_of(experiment: str, model: str, method: str, size: dict[str, Any], seed: int = 0) -> Spec:
    """The description of a run that a quick figure reads."""
    return specs(experiment, "tiny", seeds=(seed,), text="stdlib", **size)[model, method][0]


def held_out(model: Transformer, size: dict[str, Any], windows: int | None = None) -> float:
    inputs, targets = load_text(split="validation").windows(size["length"], windows or size["windows"])
    with torch.no_grad():
        return F.cross_entropy(model.double()(inputs).flatten(0, 1), targets.flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_figure_writes_its_pictures_and_numbers(name, drawn):
    check_files(name, drawn(name))


# The Curse of Depth


@torch.no_grad()
def stream(model: Transformer, inputs: Tensor) -> list[Tensor]:
    """x_1, ..., x_{L+1}, by calling one module after the other."""
    states = [model.embedding(inputs)]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


@pytest.mark.slow
def test_angles_and_drops(drawn):
    """Of one method: the mean angle over its seeds between all layers, and the rise of the loss without each block."""
    files, method = drawn("curse_of_depth_2_3_6"), "LNS"
    rows = {(int(row["seed"]), int(row["block"])): row for row in read(files[".csv"]) if row["method"] == method}
    inputs, _ = load_text(split="validation").windows(SIZE["length"], 6)
    mean = torch.zeros(SIZE["layers"] + 1, SIZE["layers"] + 1, dtype=torch.float64)
    for seed in (0, 1):
        model = kept_run(spec_of("curse-of-depth/fig3", "130M", method, SIZE, seed), files[".csv"].parent).model().eval()
        units = [F.normalize(x.double(), dim=-1) for x in stream(model, inputs)]
        for i, j in product(range(SIZE["layers"] + 1), repeat=2):
            mean[i, j] += (units[i] * units[j]).sum(-1).clamp(-1, 1).arccos().mean() / math.pi / 2
        blocks, loss = model.blocks, held_out(model, SIZE, 6)
        for k in range(SIZE["layers"]):
            model.blocks = nn.ModuleList([block for j, block in enumerate(blocks) if j != k])
            assert float(rows[seed, k + 1]["loss rise without it"]) == pytest.approx(held_out(model, SIZE, 6) - loss, abs=2e-6)
    for row in (row for row in read(files["_angles.csv"]) if row["method"] == method):
        first, n = int(row["l"]), int(row["n"])
        assert float(row["angular distance"]) == pytest.approx(float(mean[first - 1, first + n - 1]), rel=2e-5)


@pytest.mark.slow
def test_variance_and_laws(drawn):
    files, spec = drawn("curse_of_depth_4_8"), spec_of("curse-of-depth/fig4", "130M", "LNS", SIZE, 1)
    own = [row for row in read(files[".csv"]) if (row["method"], row["seed"]) == ("LNS", "1")]
    rows = {(int(row["step"]), int(row["output of block"])): float(row["variance"]) for row in own}
    inputs = torch.cat([x for x, _ in measured_on(spec)])
    for step, model in ((0, model_of(spec)), (SIZE["steps"], kept_run(spec, files[".csv"].parent).model())):
        for block, x in enumerate(stream(model.eval(), inputs)):
            assert rows[step, block] == pytest.approx(float(x.double().var(-1, correction=0).mean()), rel=2e-5)
    laws = [
        row for row in read(files["_laws.csv"]) if (row["method"], row["seed"], int(row["step"])) == ("LNS", "1", SIZE["steps"])
    ]
    assert sorted(row["law"] for row in laws) == ["exponential", "linear", "logarithmic", "quadratic"]
    y = np.array([rows[SIZE["steps"], block] for block in range(SIZE["layers"] + 1)])
    (linear,) = (row for row in laws if row["law"] == "linear")
    slope, intercept = np.polyfit(np.arange(1, len(y) + 1), y, 1)
    assert (float(linear["b"]), float(linear["a"])) == pytest.approx((slope, intercept), rel=1e-3)
    assert float(linear["r_squared"]) == pytest.approx(np.corrcoef(np.arange(len(y)), y)[0, 1] ** 2, abs=1e-4)


def test_a_figure_draws_the_runs_of_a_folder(tmp_path, capsys):
    """The runs that ``python -m papers train`` wrote, with verdicts of their size; the tiny models are not trained again."""
    sizes = {**SIZE, "layers": 4, "evaluations": 2}
    for own in specs("curse-of-depth/fig4", "tiny", seeds=(3,), **sizes).values():
        run = train_run(own[0], tmp_path / "runs" / own[0].name)
    words = ["curse_of_depth_4_8", "trained_arms", "--run", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(words) == 0
    rows = read(tmp_path / "curse_of_depth_4_8.csv")
    assert {(row["method"], row["seed"]) for row in rows} == {(name, "3") for name in ("Pre-LN", "Pre-LN, scaled init", "LNS")}
    last = [float(row["variance"]) for row in rows if (row["method"], row["step"]) == (run.spec.arm, str(SIZE["steps"]))]
    assert last == pytest.approx(run.log.series("depth", "stream", "variance")[-1], rel=1e-5)
    (losses,) = (row for row in read(tmp_path / "trained_arms.csv") if row["method"] == run.spec.arm)
    assert float(losses["held-out loss"]) == pytest.approx(run.losses[-1], rel=1e-5)
    assert "1 seed; 4 blocks of width 8" in (tmp_path / "curse_of_depth_4_8_verdicts.json").read_text()
    assert not (tmp_path / "cache").exists()
    assert main(["hybridnorm_table_3", *words[2:]]) == 1
    assert "has no finished run of Pre-Norm, normal, " in capsys.readouterr().err


# HybridNorm


@pytest.mark.slow
def test_held_out_losses_of_first_blocks(drawn):
    files = drawn("hybridnorm_4_5")
    losses = {
        (row["first block"], row["seed"]): float(row["held-out loss"])
        for row in read(files["_losses.csv"])
        if int(row["step"]) == LONGER["steps"]
    }
    spec = spec_of("hybridnorm/fig4", "550M", "HybridNorm*", LONGER, 1)
    model = kept_run(spec, files[".png"].parent).model()
    assert losses["HybridNorm*", "1"] == pytest.approx(held_out(model, LONGER), rel=1e-5)
    less = np.array([losses["EmbedNorm", seed] - losses["HybridNorm", seed] for seed in "01"])
    last = next(
        r for r in read(files["_differences.csv"]) if (r["first block"], int(r["step"])) == ("EmbedNorm", LONGER["steps"])
    )
    interval = stats.t.interval(0.95, 1, less.mean(), stats.sem(less))
    assert (float(last["low"]), float(last["high"])) == pytest.approx(interval, abs=2e-4)


# The Sharpness Disparity Principle


def exact_diagonal(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The diagonal of the Fisher information: the mean over tokens of sum_y p(y) (d log p(y) / d theta)^2, all y in turn."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def log_p(values: dict[str, Tensor]) -> Tensor:
        return torch.log_softmax(torch.func.functional_call(model, values, (inputs,)).flatten(0, 1), 1)

    p, jacobian = log_p(parameters).detach().exp(), torch.func.jacrev(log_p)(parameters)
    return {name: torch.einsum("ny,ny...->...", p, J.detach() ** 2) / len(p) for name, J in jacobian.items()}


@pytest.mark.slow
def test_the_estimate_of_the_figures_is_that_of_the_exact_fisher_information(tmp_path):
    report = sharpness_disparity_1_2_9.measure(kept_run(TINY, tmp_path))
    assert report.draws == 200
    ((inputs, _),) = measured_on(TINY)
    diagonal = exact_diagonal(kept_run(TINY, tmp_path).model().double(), inputs)
    types = {
        "Emb": ("embedding.",), "QK": ("W_Q", "W_K"), "VO": ("W_V", "W_O"), "FFN": ("W_1", "W_2"), "Norm": ("norm",),
    }  # fmt: skip
    for kind, marks in types.items():
        entries = torch.cat([x.reshape(-1) for name, x in diagonal.items() if any(mark in name for mark in marks)])
        one = report.types[kind]
        assert one.entries == len(entries)
        assert abs(one.value - float(entries.mean())) < 5 * one.standard_error < float(entries.mean()), kind


@pytest.mark.slow
def test_norms_quotients_and_the_order_are_those_of_the_kept_models(drawn):
    files = drawn("sharpness_disparity_3_8")
    norms = {(r["model"], r["panel"], r["norm_of"], int(r["step"])): float(r["norm"]) for r in read(files["_norms.csv"])}
    quotients = {(r["model"], r["matrix"], r["of"], int(r["step"])): r for r in read(files["_quotients.csv"])}
    spec = spec_of("sharpness-disparity/fig3", "GPT-2-like", "AdamW", FOLLOWED)
    run = kept_run(spec, files["_norms.csv"].parent)
    blocks = [dict(block.named_parameters()) for block in run.model(40).blocks]
    down, gain = (np.array([float(b[name].detach().norm()) for b in blocks]) for name in ("feedforward.W_2", "norm_2.weight"))
    assert norms["GPT-2-like", "FFN", "W_2", 40] == pytest.approx(down.mean(), rel=1e-5)
    assert norms["GPT-2-like", "FFN", "gamma", 40] == pytest.approx(gain.mean(), rel=1e-5)
    bounds, row = 64 * down**2 / gain**2, quotients["GPT-2-like", "W_2", "bounds", 40]
    assert float(row["S(gamma)/S(W)"]) == pytest.approx(math.sqrt(bounds[0] * bounds[1]), rel=1e-5)
    assert (float(row["low"]), float(row["high"])) == pytest.approx((bounds.min(), bounds.max()), rel=1e-5)
    for row in (rows := read(files["_sharpness.csv"])):
        same = {r["type"]: float(r["sharpness"]) for r in rows if (r["model"], r["step"]) == (row["model"], row["step"])}
        rising = [same[kind] for kind in ("Emb", "QK", "FFN", "VO", "Norm")]
        assert row["printed_order"] == str(rising == sorted(rising))


def test_lion_by_hand():
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    lion = Lion([{"params": [w], "weight_decay": 0.5}], lr=0.1)
    expected, m = np.array([1.0, -2.0]), np.zeros(2)
    for g in (np.array([0.3, -4.0]), np.array([-0.2, 7.0])):
        w.grad = torch.tensor(g)
        lion.step()
        expected = expected * (1 - 0.05) - 0.1 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        assert w.tolist() == pytest.approx(expected.tolist(), rel=1e-14)


def test_adam_mini_is_adam_where_each_group_has_equal_gradients():
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    mini = AdamMini([{"params": [ours], "name": "attention.W_Q", "lr": 0.01, "weight_decay": 0.1}], 3)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for k in range(4):
        by_head = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (k + 1)
        for p in (ours, theirs):
            p.grad = by_head.repeat_interleave(2).expand(4, 6).clone()
        mini.step()
        adam.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


FROM_RUNS = {
    "sharpness_disparity_4_10_table_2": ("_curves.csv", "table2", "fig10"),
    "sharpness_disparity_6_7_11": (".csv", "fig6", "fig7-lion", "fig7-wsd"),
}


@pytest.mark.parametrize("name", FROM_RUNS)
def test_figures_of_learning_rates_read_the_runs_of_a_folder(name, tmp_path):
    """Losses are those of the runs, and nothing is trained."""
    ends = set()
    end, *experiments = FROM_RUNS[name]
    for experiment in experiments:
        for own in specs(f"sharpness-disparity/{experiment}", "tiny", seeds=(3, 4), **{**SIZE, "every": 2}).values():
            for spec in own:
                run = train_run(spec, tmp_path / "runs" / spec.name)
                ends.add((f"{run.losses[-1]:.6g}", str(spec.seed)))
    assert main([name, "--run", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    drawn = {(row["loss"], row["seed"]) for row in read(tmp_path / f"{name}{end}") if int(row["step"]) == SIZE["steps"]}
    assert drawn == ends
    assert not (tmp_path / "cache").exists()


@torch.no_grad()
@pytest.mark.parametrize("name", ["curvature_gap_5", "curvature_gap_7_11"])
def test_figures_of_images_read_the_runs_of_a_folder(name, tmp_path, capsys):
    """Norms are those of the trained matrices, of every seed where a figure has several."""
    for spec in specs("curvature-gap/mnist", "tiny", seeds=(3, 4), d_model=4, d_ff=6, steps=3, kept=(1,), every=0)[
        "MNIST", "AdamW"
    ]:
        train_run(spec, tmp_path / "runs" / spec.name)
    assert main([name, "--run", str(tmp_path / "runs"), "--out", str(tmp_path), "--quick"]) == 0
    rows = [row for row in read(tmp_path / f"{name}.csv") if row["block"] == "blocks.0.attention.W_V"]
    wanted = {"curvature_gap_5": ((3, 0), (3, 3), (4, 0), (4, 3)), "curvature_gap_7_11": ((3, 0), (3, 1), (3, 3))}[name]
    column = "parameter_frobenius" if name == "curvature_gap_5" else "frobenius"
    assert len(rows) == len(wanted)
    for row, (seed, step) in zip(rows, wanted, strict=True):
        run = read_run(next((tmp_path / "runs").glob(f"*-{seed}")))
        state = run.models[step] if step else model_of(run.spec).state_dict()
        assert float(row[column]) == pytest.approx(float(state["blocks.0.attention.W_V"].norm()), rel=1e-5)
        assert int(row["step"]) == step
    assert main(["curvature_gap_6_12", "--run", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 1
    assert "has no finished run of AdamW; python -m papers train curvature-gap/cifar makes them" in capsys.readouterr().err
