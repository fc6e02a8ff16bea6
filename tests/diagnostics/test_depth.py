"""The depth report as a whole: what it prints, what it refuses, and that the model is left as it was."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from depth_reference import assert_same_state, gradient_of, language_model, state_of, tokens
from torch import nn

from hessiankit.diagnostics.depth import QUANTITIES, depth_diagnostics
from hessiankit.support.errors import InputError, OutOfMemoryError

IDS, LABELS = tokens(2, 4), tokens(2, 4, seed=1)


def test_everything_in_one_report():
    report = depth_diagnostics(language_model(), IDS, LABELS, what="all")
    text = str(report)
    for heading in ("sigma^2(x_l)", "cos(x,f)", "d(x_l,y_l)", "dloss", "dacc", "||grad||", "||J-I||_2", "lambda_max H", "tr G"):
        assert heading in text
    assert "blocks.2" in text
    assert "linear" in text
    assert all(len(line) < 260 for line in text.splitlines())
    html = report._repr_html_()
    assert html.count("<tr>") == 4
    assert "?" not in text
    again = json.loads(json.dumps(report.to_dict()))
    assert again["jacobians"]["spectral"][1]["value"] == report.jacobians.spectral[1].value
    assert set(report.memory) == set(QUANTITIES)
    assert all(size > 0 for size in report.memory.values())


def test_micro_batches_give_the_same_numbers():
    model = language_model(1, d_model=2, d_ff=2, n_heads=1)
    labels = LABELS.clone()
    labels[0, 1:] = -100  # the two micro-batches weigh 1 to 4
    options = {"what": "all", "curvature": "autograd", "products": 2, "exact_below": 1000}
    whole = depth_diagnostics(model, IDS, labels, **options)
    parts = depth_diagnostics(model, [(IDS[:1], labels[:1]), (IDS[1:], labels[1:])], **options)
    cut = depth_diagnostics(model, IDS, labels, **options, micro_batch=1)
    for other in (parts, cut):
        for name, key in (("stream", "variance"), ("stream", "second_moment"), ("angles", "all"), ("angles", "last"),
                          ("drop", "loss_change"), ("drop", "accuracy_change")):  # fmt: skip
            a, b = (torch.tensor(r.to_dict()[name][key], dtype=torch.float64) for r in (whole, other))
            assert (a - b).abs().max() <= 1e-10 * a.abs().max(), (name, key)
        a, b = torch.tensor(whole.gradient), torch.tensor(other.gradient)
        assert (a - b).abs().max() <= 1e-6 * a.abs().max()
        for mine, theirs in ((whole.jacobians.rms, other.jacobians.rms), (whole.hessian.trace, other.hessian.trace),
                             (whole.ggn.trace, other.ggn.trace)):  # fmt: skip
            a, b = (torch.tensor([x.value for x in found], dtype=torch.float64) for found in (mine, theirs))
            assert (a - b).abs().max() <= 1e-10 * a.abs().max()


@pytest.mark.parametrize(
    ("at", "stop"),
    [
        ("variance", ZeroDivisionError),
        ("drop", KeyboardInterrupt),
        ("jacobian", KeyboardInterrupt),
        ("hessian", ZeroDivisionError),
    ],
)
def test_the_model_is_left_as_it_was_after_an_interrupt(stop, at):
    model = language_model(2, "lns", d_model=2, d_ff=2, n_heads=1).train()
    model.blocks[0].norm_1.weight.requires_grad_(False)
    model.embedding.W_E.grad = torch.ones_like(model.embedding.W_E)
    before = state_of(model)

    def interrupt(what: str, done: int, total: int) -> None:
        assert "MiB" in what
        if what.startswith(at) and done == total - 1:
            raise stop

    with pytest.raises(stop):
        depth_diagnostics(model, IDS, LABELS, what="all", progress=interrupt, curvature="autograd", products=2)
    assert_same_state(before, model)


def test_the_model_is_left_as_it_was_when_a_block_fails():
    model = language_model().train()
    before = state_of(model)

    def fail(module, args, output):
        raise ZeroDivisionError

    handle = model.blocks[1].feedforward.register_forward_hook(fail)
    with pytest.raises(InputError, match=r"the module, called on inputs of shape .*, raised ZeroDivisionError") as caught:
        depth_diagnostics(model, IDS, LABELS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    handle.remove()
    assert_same_state(before, model)


def test_padding_does_not_count():
    model = language_model(placement="pre", seed=3)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 2:] = True
    inputs = {"inputs": IDS, "key_padding_mask": padding}
    report = depth_diagnostics(model, inputs, what=("variance", "angles"))
    assert report.stream.tokens == 6
    alone = [depth_diagnostics(model, ids, what=("variance", "angles")) for ids in (IDS[:1], IDS[1:, :2])]
    mean = sum(n * torch.tensor(r.stream.variance) for n, r in zip((4, 2), alone, strict=True)) / 6
    assert (torch.tensor(report.stream.variance) - mean).abs().max() < 1e-6 * mean.max()
    ends = depth_diagnostics(model, inputs, what="variance", tokens="last")
    assert ends.stream.tokens == 2
    assert ends.stream.variance != report.stream.variance
    assert ends.angles is ends.drop is ends.gradient is ends.jacobians is ends.hessian is None
    last = (alone[0].angles.last + alone[1].angles.last) / 2
    assert (report.angles.last - last).abs().max() < 1e-12


def test_squared_error():
    target = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = language_model()
    report = depth_diagnostics(model, IDS, target, loss="mse", what=("drop", "gradient", "hessian"))
    with torch.no_grad():
        expected = float((model(IDS) - target).square().mean())
    assert report.drop.loss == pytest.approx(expected, rel=1e-12)
    assert report.drop.accuracy is report.drop.accuracy_change is None
    assert "dacc" not in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"what": "variances"}, "did you mean 'variance'"),
        ({"what": ()}, "asks for nothing"),
        ({"tokens": "first"}, "tokens='first'"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"draws": 0}, "draws=0"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"what": "hessian", "curvature": "dense"}, "curvature='dense'"),
        ({"target": None}, "target is missing"),
        ({"target": LABELS[:, :2]}, "target has shape"),
        ({"target": torch.full((2, 4), -100)}, "every label is -100"),
    ],
)
def test_errors(options, words):
    with pytest.raises(InputError, match=words):
        depth_diagnostics(language_model(), IDS, **{"target": LABELS, **options})


def test_a_state_that_is_not_finite_is_named():
    model = language_model()
    model.blocks[1].feedforward.W_1.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"the output of block 'blocks\.1' is NaN"):
        depth_diagnostics(model, IDS, LABELS)


def test_memory_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("hessiankit.diagnostics.depth.diagnostics.available_memory", lambda device: 10_000)
    with pytest.raises(OutOfMemoryError, match="micro_batch="):
        depth_diagnostics(language_model(), IDS, LABELS, what="jacobian")


def test_memory_is_that_of_what_autograd_keeps():
    """Against the storages of a graph that is alive; a model that is frozen needs as much."""
    model = language_model()
    kept = {}
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x), x), lambda x: x):
        out = model(IDS)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept.values()}
    graph = sum(size for at, size in storages.items() if at not in known)
    weights = sum(p.numel() * 8 for block in model.blocks for p in block.parameters())
    expected = graph + 3 * out.numel() * 8 + 2 * weights
    found = depth_diagnostics(model, IDS, LABELS, what="gradient").memory["gradient"]
    assert expected / 1.3 < found < 1.3 * expected  # the two graphs differ by the attention that was chosen
    assert depth_diagnostics(model.requires_grad_(False), IDS, LABELS, what="gradient").memory["gradient"] == found


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_norms(frozen):
    """Of a frozen model too."""
    model = language_model().requires_grad_(not frozen)
    report = depth_diagnostics(model, IDS, LABELS, what="gradient")
    assert all(p.requires_grad is not frozen for p in model.parameters())
    loss = nn.functional.cross_entropy(model.requires_grad_(True)(IDS).flatten(0, 1), LABELS.flatten())
    for block, found in zip(model.blocks, report.gradient, strict=True):
        assert found == pytest.approx(float(gradient_of(loss, list(block.parameters())).norm()), rel=1e-12)


def test_the_page():
    """docs/depth.md runs, and prints what it says: headings exactly, numbers but for rounding and times."""
    text = (Path(__file__).parents[2] / "docs" / "depth.md").read_text(encoding="utf-8")
    code, printed = re.findall(r"```(?:python)?\n(.*?)\n```", text, re.DOTALL)
    with redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    found, expected = (_words(page) for page in (out.getvalue(), printed))
    assert len(found) == len(expected) > 100
    for a, b in zip(found, expected, strict=True):
        assert a == b if isinstance(a, str) else a == pytest.approx(b, rel=2e-3, abs=2e-4)


def _words(text: str) -> list[str | float]:
    """Words and numbers, without the time taken and what is only rounding (1.2e-16)."""
    text = re.sub(r"[\d.]+ s\n|[\d.]+e-\d+", "", text)
    return [float(word) if re.fullmatch(r"[+-]?[\d.]*\d", word) else word for word in re.findall(r"[^\s,()]+", text)]
