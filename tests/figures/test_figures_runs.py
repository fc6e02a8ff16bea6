"""Figures of training runs: their numbers, recomputed from the models by other routes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from figure_files import read
from figure_sizes import LONGER, RUNS, SHARPNESS, SIZE, check_files
from scipy import stats
from torch import Tensor, nn

from figures import (
    curse_of_depth_2_3_6,
    curse_of_depth_7,
    hybridnorm_4_5,
    hybridnorm_table_3,
    hybridnorm_tables_4_5,
    sharpness_disparity_1_2_9,
)
from figures._depth_models import CURSE, EMBEDDING_STD, Size, llama, olmo
from figures._runs import ByteSpec, byte_run, measured_on, model_of
from figures._sharpness_runs import order_of
from figures.sharpness_disparity_6_7_11 import AdamMini, Lion
from hessiankit.blocks import PLACEMENTS, Transformer
from hessiankit.cli.text import load_text
from hessiankit.diagnostics.sharpness import report_of, sharpness

TINY = ByteSpec(
    "tiny", layers=1, d_model=4, heads=2, length=4, batch_size=2, steps=5, every=0, windows=4, evaluations=1, draws=100
)  # fmt: skip


def held_out(model: Transformer, size: Size, windows: int | None = None) -> float:
    inputs, targets = load_text(split="validation").windows(size.length, windows or size.windows)
    with torch.no_grad():
        return F.cross_entropy(model.double()(inputs).flatten(0, 1), targets.flatten()).item()


def student(values: np.ndarray, confidence: float) -> tuple[float, float]:
    return stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))


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
    inputs, _ = load_text(split="validation").windows(SIZE.length, 6)
    mean = torch.zeros(SIZE.layers + 1, SIZE.layers + 1, dtype=torch.float64)
    for seed in curse_of_depth_2_3_6.SEEDS:
        model = byte_run(llama(method, SIZE, seed), files[".csv"].parent).model().eval()
        units = [F.normalize(x.double(), dim=-1) for x in stream(model, inputs)]
        for i, j in product(range(SIZE.layers + 1), repeat=2):
            mean[i, j] += (units[i] * units[j]).sum(-1).clamp(-1, 1).arccos().mean() / math.pi / len(curse_of_depth_2_3_6.SEEDS)
        blocks, loss = model.blocks, held_out(model, SIZE, 6)
        for k in range(SIZE.layers):
            model.blocks = nn.ModuleList([block for j, block in enumerate(blocks) if j != k])
            assert float(rows[seed, k + 1]["loss rise without it"]) == pytest.approx(held_out(model, SIZE, 6) - loss, abs=2e-6)
    for row in (row for row in read(files["_angles.csv"]) if row["method"] == method):
        first, n = int(row["l"]), int(row["n"])
        assert float(row["angular distance"]) == pytest.approx(float(mean[first - 1, first + n - 1]), rel=2e-5)


def test_stretched_rows_span_the_scale_whatever_the_angles():
    one, zero = np.array([[0.0, 0.1000, 0.3], [0.1000, 0.0, 0.1001], [0.3, 0.1001, 0.0]]), np.zeros(2)
    measured = curse_of_depth_2_3_6.Measured("LNS", 0, 1.0, one, one, zero, zero, zero)
    raw, stretched = curse_of_depth_2_3_6.maps([measured], "LNS")
    np.testing.assert_allclose(raw, [[0.1, 0.1001], [0.3, np.nan]])
    np.testing.assert_allclose(stretched, [[0.0, 1.0], [0.0, np.nan]], atol=1e-12)


@pytest.mark.slow
def test_variance_and_laws(drawn):
    files, spec = drawn("curse_of_depth_4_8"), llama("LNS", SIZE, 1)
    own = [row for row in read(files[".csv"]) if (row["method"], row["seed"]) == ("LNS", "1")]
    rows = {(int(row["step"]), int(row["output of block"])): float(row["variance"]) for row in own}
    inputs = torch.cat([x for x, _ in measured_on(spec)])
    for step, model in ((0, model_of(spec)), (SIZE.steps, byte_run(spec, files[".csv"].parent).model())):
        for block, x in enumerate(stream(model.eval(), inputs)):
            assert rows[step, block] == pytest.approx(float(x.double().var(-1, correction=0).mean()), rel=2e-5)
    laws = [row for row in read(files["_laws.csv"]) if (row["method"], row["seed"], int(row["step"])) == ("LNS", "1", SIZE.steps)]
    assert sorted(row["law"] for row in laws) == ["exponential", "linear", "logarithmic", "quadratic"]
    y = np.array([rows[SIZE.steps, block] for block in range(SIZE.layers + 1)])
    (linear,) = (row for row in laws if row["law"] == "linear")
    slope, intercept = np.polyfit(np.arange(1, len(y) + 1), y, 1)
    assert (float(linear["b"]), float(linear["a"])) == pytest.approx((slope, intercept), rel=1e-3)
    assert float(linear["r_squared"]) == pytest.approx(np.corrcoef(np.arange(len(y)), y)[0, 1] ** 2, abs=1e-4)


def test_models_are_the_papers():
    size = Size(layers=4, d_model=64)
    plain, scaled, lns = (model_of(llama(method, size, 0)) for method in ("Pre-LN", "Pre-LN, scaled init", "LNS"))
    assert plain.embedding.W_E.std().item() == pytest.approx(EMBEDDING_STD, rel=0.03)
    for (name, a), b, c in zip(plain.named_parameters(), scaled.parameters(), lns.parameters(), strict=True):
        torch.testing.assert_close(b, a / math.sqrt(2 * size.layers) if name.endswith(("W_O", "W_2")) else a)
        assert torch.equal(a, c)
    assert [block.factor for block in lns.blocks] == pytest.approx([k**-0.5 for k in range(1, 5)])
    assert {placement for placement, _ in CURSE.values()} == {"post", "pre", "lns"}
    names = [name for name, _ in curse_of_depth_7.TABLE_7.values()]
    assert {*names, *map(hybridnorm_tables_4_5.name_of, hybridnorm_tables_4_5.PRINTED)} <= set(PLACEMENTS)


@pytest.mark.slow
def test_table_7_and_the_vision_transformer(drawn):
    files = drawn("curse_of_depth_7")
    losses = {(row["method"], row["seed"]): float(row["held-out loss"]) for row in read(files[".csv"])}
    run = byte_run(llama("LNS", replace(SIZE, layers=2), 1), files[".csv"].parent)
    assert losses["LNS", "1"] == pytest.approx(run.losses[-1], rel=1e-5)
    rows = [row for row in read(files["_variances.csv"]) if (row["step"], row["seed"]) == ("0", "0")]
    first = {(row["variant"], row["block"]): float(row["variance"]) for row in rows}
    assert first["Pre-LN", "1"] == pytest.approx(first["LNS after the norm", "1"])  # the first block's factor is 1
    assert first["Pre-LN", "2"] != pytest.approx(first["LNS after the norm", "2"])


# HybridNorm


def gradients(model: Transformer, inputs: Tensor, targets: Tensor) -> list[float]:
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    return [math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters())) for block in model.blocks]


@pytest.mark.slow
def test_first_blocks_and_gradients(drawn):
    files = drawn("hybridnorm_4_5")
    last = [row for row in read(files["_losses.csv"]) if int(row["step"]) == LONGER.steps]
    losses = {(row["first block"], int(row["seed"])): float(row["held-out loss"]) for row in last}
    model = byte_run(olmo(hybridnorm_4_5.FIRST_BLOCKS["HybridNorm*"], "megatron", LONGER, 1), files[".png"].parent).model()
    assert losses["HybridNorm*", 1] == pytest.approx(held_out(model, LONGER), rel=1e-5)
    apart = {row["first block"]: row for row in read(files["_differences.csv"]) if int(row["step"]) == LONGER.steps}
    assert list(apart) == ["HybridNorm*", "First-QKV-Pre", "EmbedNorm"]
    for name, row in apart.items():
        less = np.array([losses[name, seed] - losses["HybridNorm", seed] for seed in (0, 1)])
        assert (float(row["low"]), float(row["high"])) == pytest.approx(student(less, 0.95), abs=2e-4)
    rows = {
        (r["model"], int(r["seed"]), int(r["step"]), int(r["block"])): float(r["gradient norm"])
        for r in read(files["_gradients.csv"])
    }
    name, (placement, initialisation) = next(iter(hybridnorm_4_5.FLOWS.items()))
    spec = olmo(placement, initialisation, SIZE, 1, measured=("gradient",))
    for step, trained in ((0, model_of(spec)), (3, byte_run(spec, files[".png"].parent).model())):
        (batch,) = measured_on(spec)
        found = [rows[name, 1, step, block] for block in range(1, SIZE.layers + 1)]
        assert found == pytest.approx(gradients(trained, *batch), rel=1e-4)
    ratios = {(row["model"], int(row["blocks"])): float(row["last / first"]) for row in read(files["_ratios.csv"])}
    spec = olmo("pre", "normal", replace(LONGER, layers=4), 0)
    known = gradients(model_of(spec), *measured_on(spec)[0])
    assert ratios["Pre-Norm, normal", 4] == pytest.approx(known[-1] / known[0], rel=1e-4)


def test_star_and_first_qkv_pre_start_as_one_function():
    spec = olmo("hybridnorm*", "megatron", LONGER, 0)
    one, other = (
        model_of(replace(s, block=(*s.block, ("eps", 1e-12)))).double() for s in (spec, replace(spec, placement="first-qkv-pre"))
    )
    inputs = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(one(inputs), other(inputs), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_initialisations(drawn):
    files = drawn("hybridnorm_table_3")
    runs = {(r["placement"], r["initialisation"], int(r["seed"])): float(r["held-out loss"]) for r in read(files["_runs.csv"])}
    assert len(runs) == 2 * 3 * 2
    model = byte_run(olmo("hybridnorm", "depth-scaled", LONGER, 1), files[".csv"].parent).model()
    assert runs["HybridNorm", "depth-scaled", 1] == pytest.approx(held_out(model, LONGER), rel=1e-5)
    chosen = hybridnorm_table_3.CHOSEN
    for row in read(files[".csv"]):
        names = row["initialisation"], chosen[row["placement"]]
        own, base = (np.array([runs[row["placement"], name, seed] for seed in (0, 1)]) for name in names)
        # nothing rises by half a nat in so few steps: what counts as diverged here never came below a uniform guess
        assert int(row["diverged"]) == (own > math.log(256)).sum()
        for key, values, confidence in (("held-out loss", own, 0.95), ("less the paper's choice", own - base, 1 - 0.05 / 4)):
            compared = own if key == "held-out loss" else [*own, *base]
            if max(compared) > math.log(256) or (key != "held-out loss" and names[0] == names[1]):
                assert row[f"{key}, low"] == ""
            else:
                ends = float(row[f"{key}, low"]), float(row[f"{key}, high"])
                assert ends == pytest.approx(student(values, confidence), abs=2e-3)


def test_a_diverged_run_has_no_interval():
    m = hybridnorm_table_3
    well = m.Cell("Pre-Norm", "normal", (2.0, 2.1), (False, False), (2.0, 2.0))
    gone = m.Cell("Pre-Norm", "megatron", (2.0, math.inf), (False, True), (2.0, math.inf))
    assert gone.mean is None
    assert gone.less(well) is None
    assert m.compared([well, gone]) == {("Pre-Norm", "megatron"): None}
    picture = m.picture([well, gone], m.compared([well, gone]))
    assert "diverged" in [text.get_text() for text in picture.axes[0].texts]


@pytest.mark.slow
def test_verdicts_on_table_4(drawn):
    files = drawn("hybridnorm_tables_4_5")
    rows = read(files[".csv"])
    assert len(rows) == 16 * 2 + 2 * 4 * 2
    said = {one["claim"]: one["status"] for one in json.loads(files["_verdicts.json"].read_text())}
    gone = [row["diverged"] == "True" for row in rows if (row["table"], row["placement"]) == ("4", "QK-Post")]
    first = []
    for seed in ("0", "1"):
        order = sorted((float(r["held-out loss"]), r["placement"]) for r in rows if (r["table"], r["seed"]) == ("4", seed))
        first.append({name for _, name in order[:2]} == {"HybridNorm", "HybridNorm*"})
    for claim, outcomes in (("table4-qk-post", gone), ("table4-surpass", first)):
        expected = "SUPPORTED" if all(outcomes) else "OPEN" if any(outcomes) else "CONTRADICTED"
        assert said[f"hybridnorm/{claim}"] == expected


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
    report = sharpness_disparity_1_2_9.measure(TINY, tmp_path)
    assert report.draws == 200
    ((inputs, _),) = measured_on(TINY)
    diagonal = exact_diagonal(byte_run(TINY, tmp_path).model().double(), inputs)
    types = {
        "Emb": ("embedding.",), "QK": ("W_Q", "W_K"), "VO": ("W_V", "W_O"), "FFN": ("W_1", "W_2"), "Norm": ("norm",),
    }  # fmt: skip
    for kind, marks in types.items():
        entries = torch.cat([x.reshape(-1) for name, x in diagonal.items() if any(mark in name for mark in marks)])
        one = report.types[kind]
        assert one.entries == len(entries)
        assert abs(one.value - float(entries.mean())) < 5 * one.standard_error < float(entries.mean()), kind


@pytest.mark.slow
def test_types_and_layers_are_means_over_the_same_entries(drawn):
    files = drawn("sharpness_disparity_1_2_9")
    for title in ("GPT-2-like", "LLaMA-like"):
        own = [row for row in read(files[".csv"]) if row["model"] == title]
        assert all(float(row["low"]) <= float(row["sharpness"]) <= float(row["high"]) for row in own)
        for kind in ("QK", "VO", "FFN"):
            by_layer, whole = (
                math.fsum(float(r["sharpness"]) * int(r["entries"]) for r in own if (r["of"], r["type"]) == (of, kind))
                for of in ("type and layer", "type")
            )
            assert by_layer == pytest.approx(whole, rel=1e-4)
        counted: dict[str, int] = {}
        for row in read(files["_distribution.csv"]):
            if row["model"] == title:
                counted[row["type"]] = counted.get(row["type"], 0) + int(row["entries"])
        assert counted == {row["type"]: int(row["entries"]) for row in own if row["of"] == "type"}


@pytest.mark.slow
def test_norms_quotients_and_the_order_are_those_of_the_kept_models(drawn):
    files = drawn("sharpness_disparity_3_8")
    norms = {(r["model"], r["panel"], r["norm_of"], int(r["step"])): float(r["norm"]) for r in read(files["_norms.csv"])}
    quotients = {(r["model"], r["matrix"], r["of"], int(r["step"])): r for r in read(files["_quotients.csv"])}
    titles = {key[0] for key in quotients}
    assert titles == {"GPT-2-like", "LLaMA-like"}
    spec = next(spec for title, spec in sharpness_disparity_specs().items() if title == "GPT-2-like")
    run = byte_run(spec, files["_norms.csv"].parent)
    blocks = [dict(block.named_parameters()) for block in run.model(40).blocks]
    down, gain = (np.array([float(b[name].detach().norm()) for b in blocks]) for name in ("feedforward.W_2", "norm_2.weight"))
    assert norms["GPT-2-like", "FFN", "W_2", 40] == pytest.approx(down.mean(), rel=1e-5)
    assert norms["GPT-2-like", "FFN", "gamma", 40] == pytest.approx(gain.mean(), rel=1e-5)
    bounds, row = 64 * down**2 / gain**2, quotients["GPT-2-like", "W_2", "bounds", 40]
    assert float(row["S(gamma)/S(W)"]) == pytest.approx(math.sqrt(bounds[0] * bounds[1]), rel=1e-5)
    assert (float(row["low"]), float(row["high"])) == pytest.approx((bounds.min(), bounds.max()), rel=1e-5)
    assert run.log is not None
    S = run.log.records[-1]["sharpness"]["tensors"]
    measured = [S[f"blocks.{k}.norm_2.weight"][0] / S[f"blocks.{k}.feedforward.W_1"][0] for k in (0, 1)]
    found = float(quotients["GPT-2-like", "W_1", "measured", 40]["S(gamma)/S(W)"])
    assert found == pytest.approx(math.sqrt(measured[0] * measured[1]), rel=1e-5)
    rows = read(files["_sharpness.csv"])
    for row in rows:
        same = {r["type"]: float(r["sharpness"]) for r in rows if (r["model"], r["step"]) == (row["model"], row["step"])}
        rising = [same[kind] for kind in ("Emb", "QK", "FFN", "VO", "Norm")]
        assert row["printed_order"] == str(rising == sorted(rising))


def sharpness_disparity_specs() -> dict[str, ByteSpec]:
    from figures import _sharpness_runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sharpness_runs, "_SMALLER", SHARPNESS)
        return _sharpness_runs.specs(True)


@pytest.mark.slow
def test_a_step_of_the_order_is_open_where_the_draws_do_not_tell():
    spec = replace(sharpness_disparity_specs()["LLaMA-like"], layers=1, d_model=8, heads=2, length=8, batch_size=2, batches=1)
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


@pytest.mark.slow
def test_arms_have_the_learning_rates_and_ratios_of_their_names(drawn):
    files = drawn("sharpness_disparity_4_10_table_2")
    table = {row["arm"]: row for row in read(files[".csv"])}
    searches = read(files["_searches.csv"])
    assert {row["seed"] for row in searches} == {"1000", "1001"}  # no run that judges an arm has chosen its rate
    chosen = {row["ratios"]: float(row["lr"]) for row in searches if row["chosen"] == "True"}
    lr = chosen["AdamW"]
    ratios = {name: [float(row[f"ratio_{kind}"]) for kind in ("Emb", "QK", "FFN", "VO", "Norm")] for name, row in table.items()}
    assert ratios["Emb, FFN"] == [10, 1, 6, 1, 1]
    assert ratios["Emb, FFN, QK, VO"] == [10, 8, 6, 4, 1]
    assert ratios["Norm x 2"] == [1, 1, 1, 1, 2]
    for name in ("6, 4, 3, 2", "8, 6, 4, 3", "10, 8, 6, 4"):
        assert ratios[f"({name}) at its own lr"] == [*map(float, name.split(",")), 1.0]
        assert float(table[f"({name}) at its own lr"]["lr"]) == chosen[name]
    assert all(float(table[name]["lr"]) == lr for name in ("AdamW", "Emb, FFN, QK, VO", "(8, 6, 4, 3) at AdamW's lr"))
    entries, d = (256 * 8 + 8 * 8, 2 * 64, 2 * 8 * 32, 2 * 64, 6 * 8), [10, 8, 6, 4, 1]
    uniform = sum(n * ratio for n, ratio in zip(entries, d, strict=True)) / sum(entries)
    assert float(table[f"all x {uniform:.2g}"]["lr"]) == pytest.approx(uniform * lr, rel=0.06)


@pytest.mark.slow
def test_other_optimizers(drawn):
    files = drawn("sharpness_disparity_6_7_11")
    last = {(r["case"], r["arm"], r["seed"]): float(r["loss"]) for r in read(files[".csv"]) if r["step"] == "6"}
    assert len(set(last.values())) == len(last) == 3 * 2 * 2
    said = {one["claim"] for one in json.loads(files["_verdicts.json"].read_text())}
    assert said == {f"sharpness-disparity/{name}" for name in ("fig6", "fig7-lion", "fig7-wsd")}


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
