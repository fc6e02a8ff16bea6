"""Training runs: AdamW's update, digits that depend on the description alone, finished runs that are kept; ``tune-lr``."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hessiankit.cli.text import VOCAB_SIZE, TextDataset, load_text
from hessiankit.support.errors import InputError
from papers.__main__ import main
from papers.experiments.training import train
from papers.experiments.tuning import experiment, store
from papers.experiments.tuning.experiment import (
    PAPER,
    RunSpec,
    Setting,
    entries_by_type,
    evaluated_at,
    held_out_loss,
    model_of,
    run,
    training,
    weighted_ratio,
)
from papers.experiments.tuning.store import Runs

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


def test_evaluations_entries_and_weighted_ratio():
    assert evaluated_at(400, 20) == tuple(range(0, 401, 20))
    assert evaluated_at(3, 20) == (0, 1, 2, 3)
    entries = entries_by_type(model_of(TINY, 0))
    # d = 8: embedding 256 x 8 and positions 8 x 8; four 8 x 8; 8 x 32 twice; three norms with gain and bias
    assert entries == {"Emb": VOCAB_SIZE * 8 + 64, "QK": 128, "VO": 128, "FFN": 512, "Norm": 48}
    assert weighted_ratio(PAPER, entries) == pytest.approx((2112 * 10 + 128 * 8 + 128 * 4 + 512 * 6 + 48) / 2928)


def refuse(spec):
    raise AssertionError(f"{spec} is done again")


@pytest.mark.slow
def test_the_whole_comparison_in_two_processes_and_once_more(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "QUICK", replace(TINY, steps=4, evaluations=2, windows=4))
    given = ["tune-lr", "--quick", "--jobs", "2", "--seeds", "2", "--tuning-seeds", "1", "--grid", "0.002", "0.004"]
    given += ["--out", str(tmp_path / "out")]
    files = ["--json", str(tmp_path / "x.json"), "--markdown", str(tmp_path / "page.md")]
    assert main([*given, *files]) == 0
    first = capsys.readouterr()
    assert "0 of this setting done" in first.err
    assert "Beside AdamW tuned to" in first.out
    found = json.loads((tmp_path / "x.json").read_text())
    assert len(found["arms"]) == 9
    assert found["seeds"] == [0, 1]
    tuning = {int(seed) for one in found["sweeps"] for of in one["losses"].values() for seed in of}
    assert tuning == {1000}  # no arm is chosen by the runs that judge it
    page = (tmp_path / "page.md").read_text()
    assert "python -m papers tune-lr --seeds 2 --tuning-seeds 1 --grid 0.002 0.004 --quick" in page
    path = tmp_path / "out" / "runs.jsonl"
    known = Runs(path).known
    assert len(path.read_text().splitlines()) == len(known)
    assert {spec.seed for spec in known} == {0, 1, 1000}
    spec = next(iter(known))
    assert run(spec).losses == known[spec].losses
    other = [line.replace('"version": "', '"version": "other ') for line in path.read_text().splitlines()]
    (tmp_path / "other.jsonl").write_text("\n".join([*other, "[]"]) + "\n")  # those of other code do not count
    assert not Runs(tmp_path / "other.jsonl").known

    monkeypatch.setattr(store, "run", refuse)  # all runs are kept, and the tables are the same
    assert main(given) == 0
    assert capsys.readouterr().out == first.out


# Training of a classifier ---------------------------------------------------------------------------------------------

INPUTS = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = (INPUTS[:, 0] > 0.3).long() + (INPUTS[:, 1] > 0).long()


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def digits_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(model: nn.Module, **options: object) -> tuple[float, ...]:
    settings: dict[str, object] = {"batch_size": 12, "progress": False, "lr": 0.02, **options}
    return train(model, INPUTS, LABELS, **settings)  # type: ignore[arg-type]


def test_steps_are_adam_on_seeded_epochs() -> None:
    model, reference = classifier(), classifier()
    losses = trained(model, steps=7, seed=5)
    generator, expected = torch.Generator().manual_seed(5), []
    order = torch.cat([torch.randperm(50, generator=generator)[:48] for _ in range(2)])
    parameters = list(reference.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for step in range(1, 8):
        rows = order[12 * (step - 1) : 12 * step]
        value = -reference(INPUTS[rows]).log_softmax(-1)[torch.arange(12), LABELS[rows]].sum() / 12
        expected.append(value.item())
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, torch.autograd.grad(value, parameters), moments, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                p.sub_(0.02 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    assert torch.allclose(digits_of(model), digits_of(reference), rtol=0, atol=1e-13)
    assert losses == pytest.approx(expected, abs=1e-13)


def test_the_seed_decides_and_the_callers_random_state_is_left_alone() -> None:
    models = [classifier() for _ in range(3)]
    before = torch.get_rng_state()
    first = trained(models[0], steps=20, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert trained(models[1], steps=20, seed=0) == first
    assert torch.equal(digits_of(models[0]), digits_of(models[1]))
    assert trained(models[2], steps=20, seed=1) != first


def test_a_loss_that_is_not_finite_is_named() -> None:
    with pytest.raises(InputError, match="the loss became nan at step 1; lower the learning rate"):
        train(classifier(), INPUTS * float("nan"), LABELS, steps=3, progress=False)
