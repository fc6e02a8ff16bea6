"""Training runs of a comparison: their digits depend on their description alone, and finished ones are kept; ``tune-lr``."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import pytest
import torch

from hessiankit.cli.text import VOCAB_SIZE, TextDataset, load_text
from hessiankit.support.errors import InputError
from papers.__main__ import parser
from papers.experiments.tune_lr import command_of
from papers.experiments.tune_lr import run as run_tune
from papers.experiments.tuning import experiment, store
from papers.experiments.tuning.experiment import (
    PAPER,
    RunResult,
    RunSpec,
    Setting,
    digest_of,
    entries_by_type,
    evaluated_at,
    held_out_loss,
    model_of,
    run,
    training,
    weighted_ratio,
)
from papers.experiments.tuning.store import Runs, record_of

TINY = Setting(steps=6, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=8)
SPEC = RunSpec(TINY, 0.01, PAPER, 3)


def test_the_same_description_gives_the_same_digits():
    threads = torch.get_num_threads()
    first = run(SPEC)
    torch.manual_seed(17)  # the caller's generator has no part in it, nor have the threads
    torch.set_num_threads(2)
    try:
        again = run(SPEC)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert again.losses == first.losses
    assert first.steps == (0, 2, 4, 6)
    assert len({run(replace(SPEC, seed=seed)).final for seed in (3, 4, 5)}) == 3
    assert not first.diverged


def test_a_run_computes_on_one_thread(monkeypatch):
    seen = []
    monkeypatch.setattr(experiment, "held_out_loss", lambda *_: seen.append(torch.get_num_threads()) or 1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(SPEC)
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}


class Recorded(TextDataset):
    """A text that remembers what was read."""

    def batch(self, *given, **named):
        made = super().batch(*given, **named)
        READ.append(made)
        return made


READ: list[tuple[torch.Tensor, torch.Tensor]] = []


def read_by(spec: RunSpec) -> torch.Tensor:
    READ.clear()
    text = load_text()
    for _ in training(model_of(TINY, spec.seed), Recorded(text.tokens, text.files, text.name), spec):
        pass
    return torch.stack([inputs for inputs, _ in READ])


def test_arms_of_a_seed_share_data_and_initial_parameters():
    arms = [RunSpec(TINY, lr, ratios, 3) for lr, ratios in ((0.01, ()), (0.02, ()), (0.01, PAPER))]
    batches = [read_by(arm) for arm in arms]
    assert batches[0].shape == (6, 2, 8)
    assert all(torch.equal(batches[0], other) for other in batches[1:])
    assert not torch.equal(batches[0], read_by(replace(arms[0], seed=4)))
    results = [run(arm) for arm in arms]
    assert len({result.losses[0] for result in results}) == 1
    assert len({result.final for result in results}) == 3


def factor_by_name(name: str) -> float:
    letter = name.rsplit(".", 1)[-1]
    if name.startswith("embedding."):
        return 10.0
    return {"W_Q": 8.0, "W_K": 8.0, "W_V": 4.0, "W_O": 4.0, "W_1": 6.0, "W_2": 6.0}.get(letter, 1.0)


def test_updates_are_adamw_with_a_rate_by_block_type():
    """Against AdamW, the clipping, the warm-up and the cosine written out, in float64."""
    setting = replace(TINY, steps=7, warm_up=2 / 7)
    spec = RunSpec(setting, 0.003, PAPER, 5)
    model, reference = model_of(setting, 5).double(), model_of(setting, 5).double()
    text = load_text()
    for _ in training(model, text, spec):
        pass
    generator = torch.Generator().manual_seed(5)
    named = dict(reference.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in named.items()}
    clipped = 0
    for step in range(7):
        inputs, targets = text.batch(2, 8, generator)
        log_p = reference(inputs).log_softmax(-1)
        loss = -log_p.gather(-1, targets[..., None]).mean()
        grads = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        clipped += norm > 1
        rate = (step + 1) / 3 if step < 2 else 0.05 + 0.95 * (1 + math.cos(math.pi * (step - 2) / 5)) / 2
        with torch.no_grad():
            for name, p in named.items():
                lr, g = 0.003 * rate * factor_by_name(name), grads[name] * min(1.0, 1.0 / (norm + 1e-6))
                m, v = moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.95).add_(0.05 * g**2)
                if p.ndim > 1:
                    p.mul_(1 - lr * 0.1)
                p.sub_(lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
    assert clipped  # otherwise the bound on the norm is not tested
    for name, p in model.named_parameters():
        assert torch.allclose(p, named[name], rtol=0, atol=1e-11), name


def test_held_out_loss_is_the_mean_over_all_bytes():
    model = model_of(TINY, 0).double()
    inputs, targets = load_text(split="validation").windows(8, 21)
    log_p = model(inputs).detach().log_softmax(-1)
    mean = -sum(float(log_p[i, j, targets[i, j]]) for i in range(21) for j in range(8)) / (21 * 8)
    for chunk in (21, 4, 1):
        assert held_out_loss(model, (inputs, targets), chunk) == pytest.approx(mean, rel=1e-12)


def test_divergence_is_flagged():
    result = run(RunSpec(TINY, 1e4))
    assert result.diverged
    assert len(result.losses) == len(result.steps) == 4
    assert not run(RunSpec(TINY, 1e-3)).diverged


def test_a_changed_text_is_refused():
    run(replace(SPEC, setting=replace(TINY, steps=1, digest=digest_of("stdlib"))))
    with pytest.raises(InputError, match="changed since these runs were planned"):
        run(replace(SPEC, setting=replace(TINY, digest="00000000-00000000")))


def test_evaluations_entries_and_weighted_ratio():
    assert evaluated_at(400, 20) == tuple(range(0, 401, 20))
    assert evaluated_at(3, 20) == (0, 1, 2, 3)
    entries = entries_by_type(model_of(TINY, 0))
    # d = 8: embedding 256 x 8 and positions 8 x 8; four 8 x 8; 8 x 32 twice; three norms with gain and bias
    assert entries == {"Emb": VOCAB_SIZE * 8 + 64, "QK": 128, "VO": 128, "FFN": 512, "Norm": 48}
    assert weighted_ratio(PAPER, entries) == pytest.approx((2112 * 10 + 128 * 8 + 128 * 4 + 512 * 6 + 48) / 2928)


# Runs that are kept

SHORT = replace(TINY, steps=4, evaluations=2, windows=4)
SPECS = [RunSpec(SHORT, lr, ratios, seed) for lr, ratios in ((0.01, ()), (0.02, PAPER)) for seed in (0, 1)]


def refuse(spec):
    raise AssertionError(f"{spec} is done again")


def test_a_line_holds_a_run_and_those_of_other_code_do_not_count(tmp_path):
    path = tmp_path / "runs.jsonl"
    result = RunResult(SPECS[3], (0, 2, 4), (5.5, 1 / 3, math.inf), 1.25)
    entry = record_of(result)
    path.write_text(json.dumps(entry, allow_nan=False) + "\n")
    assert list(Runs(path).known.values()) == [result]
    other = json.dumps({**entry, "version": "torch 1, code 0"})
    path.write_text(f"{other}\n[]\n" + json.dumps({"version": entry["version"]}) + "\n")
    assert not Runs(path).known


@pytest.mark.slow
def test_two_processes_give_the_digits_of_one(tmp_path):
    told = []
    with Runs(tmp_path / "two.jsonl", jobs=2, tell=lambda *given: told.append(given), expected=4) as runs:
        found = runs(SPECS)
    assert [found[spec].losses for spec in SPECS] == [run(spec).losses for spec in SPECS]
    assert [done for _, done, _ in told] == [0, 1, 2, 3, 4]
    assert {total for *_, total in told} == {4}


def test_the_same_run_is_done_once_and_counted_once(tmp_path):
    done = []
    with Runs(tmp_path / "runs.jsonl", tell=lambda _, count, total: done.append((count, total)), expected=1) as runs:
        runs([SPECS[0], SPECS[0]])
        runs([replace(SPECS[0])])
        assert len(runs.finished(SHORT)) == 1
        assert runs.finished(replace(SHORT, steps=5)) == []
        runs(SPECS[1:2])
    assert done == [(0, 1), (1, 1), (1, 1), (1, 1), (2, 2)]


# The command


def parsed(*given: str) -> argparse.Namespace:
    return parser().parse_args(["tune-lr", "--quick", "--jobs", "1", *given])


@pytest.mark.slow
def test_the_whole_comparison_and_once_more(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "QUICK", replace(TINY, steps=8, evaluations=4))
    given = ["--seeds", "2", "--tuning-seeds", "1", "--grid", "0.002", "0.004", "--out", str(tmp_path / "out")]
    files = ["--json", str(tmp_path / "x.json"), "--markdown", str(tmp_path / "page.md")]
    assert run_tune(parsed(*given, *files)) == 0
    first = capsys.readouterr()
    assert "0 of this setting done" in first.err
    for words in (
        "Blockwise eq (5) at its own lr",
        "Norm x 2",
        "Emb x 10 only",
        "all x 2",
        "measured ratios",
        "Beside AdamW tuned to",
    ):
        assert words in first.out
    found = json.loads((tmp_path / "x.json").read_text())
    assert len(found["arms"]) == 9
    assert found["seeds"] == [0, 1]
    tuning = {int(seed) for one in found["sweeps"] for of in one["losses"].values() for seed in of}
    assert tuning == {1000}  # no arm is chosen by the runs that judge it
    assert (tmp_path / "page.png").read_bytes() == (tmp_path / "out" / "learning_rates.png").read_bytes()
    page = (tmp_path / "page.md").read_text()
    assert "python -m papers tune-lr --seeds 2 --tuning-seeds 1 --grid 0.002 0.004 --quick" in page
    assert str(tmp_path / "out") not in page
    path = tmp_path / "out" / "runs.jsonl"
    known = Runs(path).known
    assert len(path.read_text().splitlines()) == len(known)
    assert {spec.seed for spec in known} == {0, 1, 1000}

    monkeypatch.setattr(store, "run", refuse)  # all runs are kept, and the tables are the same
    assert run_tune(parsed(*given)) == 0
    assert capsys.readouterr().out == first.out


def test_the_command_that_the_page_names():
    args = parsed("--steps", "30", "--text", "a/b.txt", "--confidence", "0.9", "--markdown", "docs/x.md", "--out", "somewhere")
    assert command_of(args) == (
        "python -m papers tune-lr --steps 30 --text a/b.txt --confidence 0.9 --quick --markdown docs/x.md"
    )
