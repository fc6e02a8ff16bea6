"""Influence of training samples: dense solutions, differences of whole trainings, and training again without a sample."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import assert_one_clear_error
from meter import PeakBytes
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hessiankit as hk
from hessiankit.functions.heads import weigh
from hessiankit.primitives import linear_cross_entropy
from hessiankit.training.influence import updates, work

EXACT, SOLVED, DIFFERENCES = 1e-10, 1e-7, 1e-8
"""Of the largest score: formulas; solutions, whose residual is 1e-8; differences of the fourth order of a training."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = 3, seed: int = 5) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


X, Y, X_TEST, Y_TEST = drawn(12, 4), labels(12), drawn(3, 4, seed=1), labels(3, seed=2)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def dead_unit() -> nn.Module:
    """A perceptron of which a unit has no gradient: the root of its second moment has no derivative."""
    model = perceptron()
    model[1] = nn.ReLU()
    with torch.no_grad():
        model[0].bias[2] = -100
    return model


def language_model() -> nn.Module:
    return hk.Transformer(5, 4, 6, 1, placement="pre", max_len=4, seed=0).double()


TOKENS = (labels(6, 4, classes=4), labels(6, 4, classes=5)), (labels(2, 4, classes=5, seed=7), labels(2, 4, classes=5, seed=8))
"""Training and test data of a language model."""


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.1, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "descent": sgd,
    "momentum": lambda m: sgd(m, momentum=0.9, dampening=0.1, weight_decay=0.02),
    "Nesterov": lambda m: sgd(m, momentum=0.8, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.03, weight_decay=0.02),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.03, betas=(0.8, 0.95)),
}


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, *, passes: int = 2, every: int = 3
) -> hk.RecordedRun:
    run = hk.RecordedRun(model, optimizer, every=every)
    for epoch in range(passes):
        for group in optimizer.param_groups:
            group["lr"] *= 1 - 0.2 * epoch
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            loss_of(model, x, y).mean().backward()
            optimizer.step()
    return run


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Loss of each sample, the mean over its tokens."""
    z = model(x)
    return F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="none").reshape(len(x), -1).mean(1)


def shuffled(data: tuple[Tensor, Tensor], size: int = 5) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(3))


def end_of_training(
    make: Callable[[], nn.Module], optimizer: Any, run: hk.RecordedRun, data: Any, test: Any, weights: Tensor
) -> Tensor:
    """Losses of the test samples after the steps of a run in which samples have weights, by torch's own optimizer."""
    model, (x, y) = make(), data
    steps = optimizer(model)
    for step in run.steps:
        at = list(step.samples)
        for group, settings in zip(steps.param_groups, step.settings, strict=True):
            group["lr"] = settings["lr"]
        steps.zero_grad()
        (loss_of(model, x[at], y[at]) * weights[at]).mean().backward()
        steps.step()
    return loss_of(model, *test).detach()


CASES = [(name, perceptron, ((X, Y), (X_TEST, Y_TEST))) for name in OPTIMIZERS]
CASES += [("AdamW", dead_unit, ((X, Y), (X_TEST, Y_TEST)))]
CASES += [(name, language_model, TOKENS) for name in ("momentum", "AdamW")]


@pytest.mark.parametrize(("name", "make", "sets"), CASES)
def test_a_replay_is_the_derivative_of_the_training(name: str, make: Callable[[], nn.Module], sets: Any) -> None:
    """Two passes with a rate that falls, batches of two sizes and groups of parameters, against differences of the whole."""
    (data, test), optimizer = sets, OPTIMIZERS[name]
    model, loader = make(), shuffled(data)
    run = trained(model, optimizer(model), loader)
    found = hk.influence(model, loader, test, method=run, loss="cross_entropy")
    assert found.scores.shape == (len(data[0]), len(test[0]))
    for sample in (0, 4):
        unit = torch.zeros(len(data[0]), dtype=torch.float64)
        unit[sample] = 1e-4
        by_distance = {k: end_of_training(make, optimizer, run, data, test, 1 + k * unit) for k in (-2, -1, 1, 2)}
        slope = (8 * (by_distance[1] - by_distance[-1]) - (by_distance[2] - by_distance[-2])) / 12e-4
        assert float((found.scores[sample] + slope).abs().max()) <= DIFFERENCES * float(found.scores.abs().max())


def flat(loss: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])


@pytest.mark.parametrize("method", ["ggn", "hessian", "kfac", "ekfac"])
@pytest.mark.parametrize("draws", [None, 2])
def test_solutions_of_the_dense_matrix(method: str, draws: int | None) -> None:
    if method == "hessian" and draws:
        pytest.skip("labels are drawn for Gauss-Newton matrices")
    model, damping = perceptron(), 0.5
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    found = hk.influence(model, loader, (X_TEST, Y_TEST), method=method, damping=damping, draws=draws, loss="cross_entropy")
    kind = "hessian" if method == "hessian" else "fisher-mc" if draws else "ggn"
    A = hk.hessian_operator(model, loader, loss="cross_entropy", kind=kind, draws=draws or 1)
    C = (A.approximation(method) if "kfac" in method else A).to_matrix()
    g, g_test = (torch.stack([flat(loss, model) for loss in loss_of(model, x, y)]) for x, y in ((X, Y), (X_TEST, Y_TEST)))
    expected = g @ torch.linalg.solve(C + damping * torch.eye(len(C)).double(), g_test.T) / len(X)
    tolerance = EXACT if "kfac" in method else SOLVED
    assert float((found.scores - expected).abs().max()) <= tolerance * float(expected.abs().max())
    assert not found.notes


def test_scores_of_tokens_add_up_to_those_of_samples() -> None:
    """Both routes agree; sequences of two lengths are padded with NaN, and a position without a label has no score."""
    model, (x, y) = language_model(), TOKENS[0]
    y = y.clone()
    y[1, 2] = -100
    batches = [(x[:2], y[:2]), (x[2:, :3], y[2:, :3])]
    options: dict[str, Any] = {"method": "ggn", "damping": 0.1, "loss": "cross_entropy"}
    whole, tokens = (hk.influence(model, batches, TOKENS[1], per_token=k, **options) for k in (False, True))
    assert tokens.scores.shape == (6, 4, 2)
    assert float((whole.scores - tokens.by_sample).abs().max()) <= EXACT * float(whole.scores.abs().max())
    assert torch.equal(tokens.scores.isnan()[..., 0], torch.tensor([[False] * 4] * 2 + [[False] * 3 + [True]] * 4))
    assert float(tokens.scores[1, 2].abs().max()) == 0
    run = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), loader := shuffled(TOKENS[0]))
    whole, tokens = (hk.influence(model, loader, TOKENS[1], method=run, per_token=k, loss="cross_entropy") for k in (False, True))
    assert tokens.scores.shape == (6, 4, 2)
    assert float((whole.scores - tokens.by_sample).abs().max()) <= EXACT * float(whole.scores.abs().max())


class Stopped(BaseException):
    """An interruption, as by Ctrl-C."""


class Interrupted(nn.Module):
    """A perceptron that is interrupted at one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        CALLS["left"] -= 1
        if CALLS["left"] == 0:
            raise Stopped
        return self.inner(x)


CALLS = {"left": 0}


@pytest.mark.parametrize("is_replay", [False, True])
def test_an_interrupted_call_goes_on(is_replay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PAUSE", math.inf)  # the file is written at the interruption
    CALLS["left"] = 0
    model, loader = Interrupted(), DataLoader(TensorDataset(X, Y), batch_size=4)
    options: dict[str, Any] = {"method": "ggn", "damping": 0.5}
    if is_replay:
        options = {"method": trained(model, torch.optim.Adam(model.parameters(), lr=0.03), loader)}

    def scored(**more: Any) -> Tensor:
        return hk.influence(model, loader, (X_TEST, Y_TEST), loss="cross_entropy", **options, **more).scores

    before = CALLS["left"]
    expected = scored()
    calls = before - CALLS["left"]
    CALLS["left"] = calls - 2
    with pytest.raises(Stopped):
        scored(out=tmp_path / "scores.pt")
    CALLS["left"] = calls - 2  # fewer are left to do
    assert torch.equal(scored(out=tmp_path / "scores.pt"), expected)
    CALLS["left"] = 0
    with torch.no_grad():
        model.inner[0].bias += 1
    if not is_replay:
        assert_one_clear_error(lambda: scored(out=tmp_path / "scores.pt"), "belongs to another model, data or method")


def test_scores_order_samples_as_training_again_without_them() -> None:
    """Twelve trainings of a perceptron, each without one sample: rank correlation of a replay, and the lower end of its 95 % interval."""
    model, loader, optimizer = perceptron(), shuffled((X, Y), 4), OPTIMIZERS["momentum"]
    run = trained(model, optimizer(model), loader, passes=4)
    scores = hk.influence(model, loader, (X_TEST, Y_TEST), method=run, loss="cross_entropy").scores.mean(1)
    ones = torch.ones(len(X), dtype=torch.float64)
    losses = [
        end_of_training(perceptron, optimizer, run, (X, Y), (X_TEST, Y_TEST), ones - unit).mean()
        for unit in (0 * ones, *torch.eye(len(X)).double())
    ]
    rho = float(spearmanr(torch.stack(losses[1:]) - losses[0], scores).statistic)
    half_width = 1.96 * math.sqrt(1.06 / (len(X) - 3))  # Fieller, Hartley and Pearson 1957
    assert rho > 0.9
    assert math.tanh(math.atanh(min(rho, 1 - 1e-9)) - half_width) > 0.7


def test_the_record_is_kept_in_a_file_and_results_print_and_draw(tmp_path: Path) -> None:
    model, loader = perceptron(), shuffled((X, Y))
    run = trained(model, OPTIMIZERS["AdamW"](model), loader)
    run.save(tmp_path / "run.pt")
    found, again = (
        hk.influence(model, data, (X_TEST, Y_TEST), method=record, loss="cross_entropy")
        for data, record in ((loader, run), ((X, Y), hk.RecordedRun.load(tmp_path / "run.pt")))
    )
    assert torch.equal(found.scores, again.scores)
    order = found.ranking(test=1).tolist()
    assert order[0] == int(found.scores[:, 1].argmax())
    assert "replay of 6 steps of AdamW: 12 training and 3 test samples" in str(found)
    figure = found.plot(tmp_path / "scores.png", test=1, count=3)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()][::-1] == [str(k) for k in order[:3] + order[-3:]]
    assert found.to_dict()["scores"] == found.scores.tolist()


class Attention(nn.Module):
    """Attention by torch's fused kernel, which has no double backward on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).unsqueeze(1)
        return self.last(F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0])


def test_attention_is_replayed_inside_the_context_and_else_refused_with_it() -> None:
    model, data = Attention(), (drawn(6, 3, 4), labels(6, 3))
    loader = shuffled(data, 3)
    run = trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)

    def scored() -> hk.training.influence.Influence:
        return hk.influence(model, loader, data, method=run, loss="cross_entropy")

    assert_one_clear_error(scored, r"torch says: .* is not implemented; run the call inside hessiankit.twice_differentiable")
    with hk.twice_differentiable():
        assert bool(scored().scores.isfinite().all())


class Counted(TorchDispatchMode):
    """Counts how often torch differentiates the softmax of the logits of all tokens, which keeps them."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._log_softmax_backward_data.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("per_token", [False, True])
def test_a_model_whose_head_is_joined_with_its_loss_is_replayed_as_with_eager_attention(
    per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own loss: inside the context it is computed past the logits, also where scores of samples are read."""
    hf = pytest.importorskip("transformers")
    monkeypatch.setattr(linear_cross_entropy, "LOGITS", 20)
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2, "use_cache": False}
    scores = []
    for attention, context in (("eager", nullcontext()), ("sdpa", hk.twice_differentiable())):
        torch.manual_seed(0)
        config = hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation=attention)
        model = hf.GPT2LMHeadModel(config).double().eval()
        train, test = (DataLoader([{"input_ids": t, "labels": t} for t in labels(n, 6, classes=7)], batch_size=2) for n in (4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = hk.RecordedRun(model, optimizer)
        with context:
            for batch in run.batches(train):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
            with Counted() as counted:
                scores.append(hk.influence(model, train, test, method=run, per_token=per_token).scores)
        assert (counted.calls == 0) == (attention == "sdpa")
    rounded = 1e-6  # the steps are those of the library's loss, which rounds logits to float32
    assert float((scores[1] - scores[0]).abs().max()) <= rounded * float(scores[0].abs().max())


def clipped(model: nn.Module, loader: Any) -> hk.RecordedRun:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hk.RecordedRun(model, optimizer, every=2)
    for x, y in run.batches(loader):
        optimizer.zero_grad()
        loss_of(model, x, y).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return run


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "gnn", "damping": 0.1}, "method='gnn' is not known; did you mean 'ggn'"),
    "no damping": ({"method": "ggn"}, "damping=None: scores depend on it"),
    "damping": ({"method": "ggn", "damping": -1.0}, "damping=-1.0; pass 0 or more"),
    "draws": ({"method": "kfac", "damping": 0.1, "draws": 0}, "draws=0"),
    "order": ({"method": "ggn", "damping": 0.1, "train": shuffled((X, Y))}, "train shuffles"),
    "tokens": (
        {"method": "ggn", "damping": 0.1, "per_token": True},
        r"per_token=True needs outputs \(samples, tokens, classes\)",
    ),
    "samples": (
        {"method": "ggn", "damping": 0.1, "loss": lambda z, t: z.logsumexp(0).sum(), "model": nn.Flatten(0).double()},
        "no parameters",
    ),
    "damped replay": ({"method": clipped, "damping": 0.1}, "damping=0.1: a replay has none"),
    "clipped": ({"method": clipped}, "steps 2 to 3 of the run, made again, end elsewhere, off by|steps 0 to 2 of the run"),
    "another loss": ({"method": trained, "loss": nn.CrossEntropyLoss(label_smoothing=0.5)}, "made again, end elsewhere"),
    "fewer data": ({"method": trained, "train": (X[:4], Y[:4])}, r"samples up to number 11, train has 4"),
    "no data set": ({"method": trained, "train": [(X, Y)]}, "train is a list; a replay needs a DataLoader"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_one_clear_error(name: str) -> None:
    options, message = REFUSED[name]
    model, loader = perceptron(), DataLoader(TensorDataset(X, Y), batch_size=5)
    arguments = {"model": model, "train": loader, "test": (X_TEST, Y_TEST), "loss": "cross_entropy", **options}
    if arguments["method"] is clipped:
        arguments["method"] = clipped(model, loader)
    elif arguments["method"] is trained:
        arguments["method"] = trained(model, OPTIMIZERS["descent"](model), loader)
    assert_one_clear_error(lambda: hk.influence(**arguments), message)


RECORDS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "kind": (
        lambda m: hk.RecordedRun(m, torch.optim.RMSprop(m.parameters())),
        "the optimizer is RMSprop; expected one of SGD, Adam",
    ),
    "amsgrad": (lambda m: hk.RecordedRun(m, torch.optim.Adam(m.parameters(), amsgrad=True)), "amsgrad=True"),
    "every": (lambda m: hk.RecordedRun(m, torch.optim.SGD(m.parameters()), every=0), "every=0; pass 1 or more"),
    "others": (lambda m: hk.RecordedRun(m, torch.optim.SGD(perceptron().parameters())), "4 parameters of the optimizer are none"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_cannot_be_recorded_is_one_clear_error(name: str) -> None:
    call, message = RECORDS[name]
    assert_one_clear_error(lambda: call(perceptron()), message)


def test_a_step_without_named_samples_is_an_error() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters())
    run = hk.RecordedRun(model, optimizer)
    run.use([0, 1])
    optimizer.step()
    assert_one_clear_error(optimizer.step, "the samples of this step are not known; draw them from")


def test_a_step_of_a_replay_keeps_parameters_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows by three vectors of Adam for each step between checkpoints; logits that are weighted are not kept alive."""
    monkeypatch.setattr(updates, "ENTRIES", 100)
    model = nn.Sequential(nn.Linear(4, 2000, dtype=torch.float64), nn.Tanh(), nn.Linear(2000, 3, dtype=torch.float64))
    size, data = sum(p.numel() for p in model.parameters()), (X[:1], Y[:1])
    peaks = []
    for steps in (4, 8):
        network = copy.deepcopy(model)
        run = trained(network, torch.optim.Adam(network.parameters()), shuffled(data), passes=steps, every=steps)
        with PeakBytes(*network.parameters(), *run.checkpoints[0].values()) as meter:
            hk.influence(network, shuffled(data), (X_TEST[:1], Y_TEST[:1]), method=run, loss="cross_entropy")
        peaks.append(meter.marked / (8 * size))
    # of four steps; a peak may hold one vector more or less, as temporaries are freed, a fourth one in each step would add four
    assert abs(peaks[1] - peaks[0] - 4 * 3) < 2
    z, alive = torch.ones(2, 3, requires_grad=True) * 1, []
    weakref.finalize(z, alive.append, "freed")
    weigh(z, torch.ones(2))
    del z
    assert alive == ["freed"]
