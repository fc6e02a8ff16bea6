"""``python -m papers train``: presets against the print, data, one loop on one process and on two, interruption, experts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hessiankit.support.errors import InputError
from papers import claims
from papers.__main__ import main
from papers.experiments.catalogue import EXPERIMENTS, NO_RUN, numbers_of, specs
from papers.experiments.experts import BALANCE, Z_LOSS, Experts
from papers.experiments.forecast import agreement, forecast
from papers.experiments.runs import STEPS, Ranks, Run, kept_run, read_run, train_run
from papers.experiments.spec import Spec, model_of
from papers.experiments.tokens import data_of, fitted
from papers.experiments.train import chosen

ROOT = Path(__file__).parents[2]
SMALL = Spec(
    "small", layers=2, d_model=8, heads=2, length=8, batch_size=4, steps=7, every=0, windows=8, evaluations=7, warm_up=0.3
)  # fmt: skip

# Presets against the print --------------------------------------------------------------------------------------------
DIFFERENT = {
    "curse-of-depth/table1 350M": 367_969_280, "curse-of-depth/table1 1B": 1_339_082_752,
    "curse-of-depth/table3 OLMo-1B": 1_176_832_000, "sharpness-disparity/fig4 LLaMA (2B)": 1_682_532_352,
    "sharpness-disparity/fig5-c4 LLaMA (0.2B)": 124_816_128,
}  # fmt: skip
"""Models whose count is not the printed one, with the count that their sizes give."""


def paper_models() -> list[tuple[str, str]]:
    return [(name, size) for name, one in EXPERIMENTS.items() for size in one.models]


def by_hand(spec: Spec) -> int:
    """The parameters of a Pre-Norm decoder with RMSNorm, SwiGLU and no biases by its sizes: a second way to count."""
    d, d_ff, block = spec.d_model, spec.d_ff or 0, dict(spec.block)
    kv = d * block.get("n_kv_heads", spec.heads) // spec.heads
    networks = 3 * d * d_ff * (spec.experts[0] if spec.experts else 1) + (d * spec.experts[0] if spec.experts else 0)
    biases = 2 * d + 2 * kv if block.get("attention_bias") else 0
    return (2 - spec.tied) * spec.vocabulary * d + spec.layers * (2 * d * d + 2 * d * kv + networks + biases + 2 * d) + d


@pytest.mark.parametrize(("name", "size"), paper_models())
def test_the_paper_preset_has_the_printed_parameters_or_says_why_not(name: str, size: str) -> None:
    runs = {arm: own[0] for (of, arm), own in specs(name, "paper").items() if of == size}
    spec = next((one for one in runs.values() if one.placement == "pre"), next(iter(runs.values())))
    count, model = forecast(spec).parameters, EXPERIMENTS[name].models[size]
    if spec.norm == "rmsnorm" and spec.placement == "pre":
        assert count == by_hand(spec)
    if model.parameters is None:
        assert agreement(model, count) == "no count in print"
        return
    printed = float(model.parameters.value[:-1]) * {"M": 1e6, "B": 1e9}[model.parameters.value[-1]]
    words = f"{model.parameters.value} in print ({model.parameters.place})"
    if f"{name} {size}" in DIFFERENT:
        assert (count, agreement(model, count)) == (DIFFERENT[f"{name} {size}"], f"{words}; {model.why}")
        assert claims(id=model.why)[0].verdict in ("WRONG AS PRINTED", "VAGUE")
    else:
        assert count == pytest.approx(printed, rel=0.04)
        assert agreement(model, count) == words


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_number_of_a_paper_preset_has_its_place(name: str) -> None:
    needed = {"layers", "d_model", "heads", "d_ff", "length", "vocabulary", "placement", "norm", "activation", "steps", "lr",
              "batch_size", "optimizer", "weight_decay", "betas", "clip", "warm_up", "floor", "initialisation", "std"}  # fmt: skip
    experiment = EXPERIMENTS[name]
    for size in experiment.models:
        for arm in experiment.arms:
            numbers = numbers_of(experiment, size, arm)
            assert all(number.place for number in numbers.values())
            assert needed - numbers.keys() <= {"placement", "optimizer", "std", "floor", "betas", "clip", "norm", "warm_up"}, arm


FIGURES = {"curse-of-depth": (9, 8), "curvature-gap": (12, 1), "hybridnorm": (8, 7), "sharpness-disparity": (11, 4)}
"""Last figure and last table of each paper."""


def test_no_figure_or_table_is_without_a_command_or_a_reason() -> None:
    found: set[str] = set(NO_RUN)
    for name, one in EXPERIMENTS.items():
        for kind, listed in re.findall(r"(Figure|Table)s? (\d[^A-Z]*)", re.sub(r"\([^)]*\)", "", one.shows)):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
                numbers = range(int(first), int(last or first) + 1)
                found |= {f"{name.split('/')[0]}/{'fig' if kind == 'Figure' else 'table'}{number}" for number in numbers}
    for paper, (figures, tables) in FIGURES.items():
        wanted = {f"{paper}/fig{k}" for k in range(1, figures + 1)} | {f"{paper}/table{k}" for k in range(1, tables + 1)}
        assert wanted - found == set(), paper


def test_hours_are_those_of_the_operations() -> None:
    found = forecast(specs("curse-of-depth/table4", "paper")["Qwen2.5-0.5B", "LNS"][0])
    tokens = 11_444 * 512 * 1024
    assert found.tokens == tokens
    assert found.flops == tokens * (6 * found.parameters + 12 * 24 * 1024 * 896)
    assert found.hours(1e15) == pytest.approx(found.flops / 3.6e18)
    moe = forecast(specs("hybridnorm/fig3", "paper")["MoE-1B-7B", "Pre-Norm"][0])
    assert moe.parameters - moe.active == 16 * 56 * 3 * 2048 * 1024  # 56 of 64 experts rest


def test_the_dry_run_names_parameters_places_and_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "hybridnorm/fig3", "--preset", "paper", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for words in ("6,918,998,016", "6.9B in print (Sec. 4.1)", "Table 7", "OLMoE-mix-0924", "hours of one device at 1.25e+14"):
        assert words in said


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two training files and a held-out one, of tokens below 300."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, start, count in (("a", 0, 90), ("b", 90, 210), ("val", 300, 80)):
        (np.arange(start, start + count) % 300).astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def test_windows_of_shards_are_consecutive_tokens_of_one_file(shards: Path) -> None:
    train, held_out = data_of(replace(SMALL, text=str(shards), vocabulary=300))
    inputs, targets = train.batch(5000, 8, torch.Generator().manual_seed(0))
    torch.testing.assert_close(targets, inputs + 1)  # a file counts upwards, and no window leaves its file
    assert {int(start) for start in inputs[:, 0]} == {*range(82), *range(90, 292)}
    first, last = held_out.windows(8, 2)[0]
    assert (first[0].item(), last[0].item()) == (0, 71)


def test_a_vocabulary_fits_the_data(shards: Path) -> None:
    with pytest.raises(InputError, match="has the token or class 299; small has 256 of them"):
        data_of(replace(SMALL, text=str(shards)))
    assert fitted(SMALL, str(shards)).vocabulary == 300
    alone = shards / "alone"
    alone.mkdir()
    (shards / "val.bin").rename(alone / "val.bin")
    with pytest.raises(InputError, match="one file of tokens; expected a second, named val"):
        data_of(replace(SMALL, text=str(alone)))


def test_images_from_a_file_have_the_papers_49_tokens(tmp_path: Path) -> None:
    labels = np.arange(60) % 10
    images = np.random.default_rng(0).integers(0, 255, (60, 28, 28)).astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", images=images, labels=labels)
    (spec,) = chosen("curvature-gap/mnist", "tiny", data=str(tmp_path / "mnist.npz"))["MNIST", "AdamW"]
    assert (spec.image, spec.length, spec.vocabulary) == ((28, 28, 1, 4), 49, 10)
    run = train_run(replace(spec, steps=2, batch_size=8, windows=4, every=0), tmp_path / "run")
    assert sorted(map(len, run.model().state_dict().values()))[-1] == 49  # a learned position for each token
    with pytest.raises(InputError, match="takes"):
        data_of(replace(spec, image=(32, 32, 3, 4)))


# The loop -------------------------------------------------------------------------------------------------------------


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same_digits(one: Run, other: Run) -> None:
    assert curve(one.folder) == curve(other.folder)
    assert (one.losses, one.train_losses) == (other.losses, other.train_losses)
    for name, tensor in one.models[one.spec.steps].items():
        assert torch.equal(tensor, other.models[one.spec.steps][name]), name


OPTIMIZERS = {
    "adamw": SMALL,
    "adam_mini": replace(SMALL, optimizer="adam_mini"),
    "lion": replace(SMALL, optimizer="lion", betas=(0.9, 0.99), lr=1e-3),
    "muon, wsd, by type": replace(SMALL, optimizer="muon", schedule="wsd", ratios=(("Emb", 10.0),), ramp="switch", floor=0.0),
    "monitored": replace(SMALL, every=2, measured=("norms",), log_spaced=False, kept=(1,)),
    "experts": replace(SMALL, experts=(3, 2), norm="rmsnorm", activation="swiglu"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_resumes_with_the_same_digits(name: str, tmp_path: Path) -> None:
    spec = OPTIMIZERS[name]
    whole = train_run(spec, tmp_path / "whole", every=2)

    def interrupt(text: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(spec, tmp_path / "cut", every=2, tell=interrupt)
    assert [file.name for file in (tmp_path / "cut").glob("checkpoint*")] == ["checkpoint-4-0.pt"]
    resumed = train_run(spec, tmp_path / "cut", every=2)
    same_digits(whole, resumed)
    same_digits(whole, read_run(tmp_path / "cut"))
    assert not list((tmp_path / "cut").glob("checkpoint*"))
    if spec.every:
        assert resumed.log is not None
        assert whole.log is not None
        assert resumed.log.steps.tolist() == whole.log.steps.tolist() == [0, 2, 4, 6, 7]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    def interrupt(text: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(SMALL, tmp_path, every=2, tell=interrupt)
    with pytest.raises(InputError, match=r"checkpoint-2-0\.pt is of another run; remove its folder"):
        train_run(replace(SMALL, lr=1.0), tmp_path, every=2)
    same_digits(train_run(SMALL, tmp_path), kept_run(SMALL, tmp_path / "figures"))


def test_gradients_of_parts_of_a_batch_are_those_of_the_batch(tmp_path: Path) -> None:
    whole, parts = (train_run(SMALL, tmp_path / str(k), ranks=Ranks(micro=k, recompute=k == 1)) for k in (4, 1))
    assert parts.train_losses == pytest.approx(whole.train_losses, rel=1e-5)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.losses[-1] < whole.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--shard", "--micro", "1", "--checkpoint", "2")], ids=["DDP", "FSDP2"])
def test_two_processes_train_like_one(options: tuple[str, ...], tmp_path: Path) -> None:
    words = [
        "-m",
        "papers",
        "train",
        "curse-of-depth/table6",
        "--model",
        "130M",
        "--arm",
        "LNS",
        "--seed",
        "0",
        "--set",
        "steps=6",
    ]
    assert main([*words[2:], "--out", str(tmp_path / "one")]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words, *options]
    subprocess.run([*command, "--out", str(tmp_path / "two")], check=True, capture_output=True, cwd=ROOT)
    one, two = (next((tmp_path / name).rglob("run.pt")).parent for name in ("one", "two"))
    for line, other in zip(curve(one), curve(two), strict=True):
        assert line == pytest.approx(other, rel=1e-5)
    for name, tensor in read_run(one).models[6].items():
        torch.testing.assert_close(read_run(two).models[6][name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_tiny_experiment_trains(name: str, tmp_path: Path) -> None:
    for own in list(specs(name, "tiny", steps=2, batch_size=2, windows=2, draws=1, batches=1).values())[-1:]:
        run = train_run(own[0], tmp_path)
        assert len(run.train_losses) == 2
        assert np.isfinite(run.losses).all()
        assert (run.log is None) == (own[0].every == 0)


# Experts --------------------------------------------------------------------------------------------------------------


def test_experts_are_the_sum_over_the_largest_probabilities() -> None:
    spec = replace(SMALL, experts=(5, 2), activation="swiglu", norm="rmsnorm")
    layer = model_of(spec).double().blocks[0].feedforward
    assert isinstance(layer, Experts)
    y = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = layer(y).reshape(-1, 8)
    p = torch.softmax(y.reshape(-1, 8) @ layer.W_R, -1)
    counts = torch.zeros(5, dtype=torch.float64)
    for token, probabilities, value in zip(y.reshape(-1, 8), p, found, strict=True):
        largest = sorted(range(5), key=lambda e: -probabilities[e].item())[:2]
        counts[largest] += 1
        expected = torch.zeros(8, dtype=torch.float64)
        for e in largest:
            network = layer.experts[e]
            expected = expected + probabilities[e] * ((F.silu(token @ network.W_G) * (token @ network.W_1)) @ network.W_2)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-8)  # the router is in float32
    z = (y.reshape(-1, 8) @ layer.W_R).exp().sum(-1).log().square().mean()
    balance = 5 * (counts / counts.sum() * p.mean(0)).sum()
    torch.testing.assert_close(layer.auxiliary.double(), BALANCE * balance + Z_LOSS * z, rtol=1e-5, atol=1e-8)


# The command ----------------------------------------------------------------------------------------------------------
REFUSALS: dict[str, tuple[list[str], str]] = {
    "unknown": (["hybridnorm/table9"], "hybridnorm/table9"),
    "no run": (["hybridnorm/table1"], "is no training run: python -m papers evaluate on the models of hybridnorm/fig1"),
    "model": (["hybridnorm/table3", "--model", "1B"], "550M"),
    "arm": (["curse-of-depth/table6", "--arm", "LN"], "LNS"),
    "data": (["hybridnorm/table3", "--preset", "paper"], "reads its data from --data: OLMoE-mix-0924"),
    "attribute": (["hybridnorm/table3", "--set", "stepps=3"], "steps"),
    "optimizer": (["curse-of-depth/table8", "--set", "optimizer=sgd"], "adamw"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = REFUSALS[name]
    assert main(["train", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_rows_and_resumes_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "curse-of-depth/table8", "--seed", "1", "--arm", "LNS", "--set", "steps=2", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "rows.json")]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["method"], row["seed"], row["diverged"]) == ("LNS", 1, False)
    assert row["perplexity"] == pytest.approx(np.exp(row["held-out loss"]))
    before = next(tmp_path.rglob("run.pt")).stat().st_mtime_ns
    assert main(words) == 0
    assert next(tmp_path.rglob("run.pt")).stat().st_mtime_ns == before
    capsys.readouterr()
    assert main(["train", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*EXPERIMENTS]
