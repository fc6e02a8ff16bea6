"""hessian_function: planned once, the same matrix as hessian() wherever it is evaluated, and an error where it cannot be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, largest_error, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support.errors import InputError, TraceError

DOUBLE = torch.float64


class Gated(nn.Module):
    """Attention whose logits grow with ``factor``, and a branch on it."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(3, 3, dtype=DOUBLE))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        logits = self.factor * x @ self.W @ x.mT
        weights = torch.softmax(logits, -1)
        return weights @ x if self.factor < 100 else torch.relu(logits) @ x


def classifier() -> tuple[nn.Module, Tensor, Tensor]:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)).double().eval()
    return module, torch.randn(5, 4, dtype=DOUBLE), torch.tensor([0, 2, 1, -100, 2])


def block(placement: str, **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    module = hk.TransformerBlock(d_model=4, d_ff=3, n_heads=2, placement=placement, **options).double()
    return module, torch.randn(2, 3, 4, dtype=DOUBLE), torch.randn(2, 3, 4, dtype=DOUBLE)


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    model = hk.Transformer(5, 4, 5, n_layers=1, n_heads=2, causal=True, max_len=4).double()
    tokens = torch.randint(5, (2, 5))
    return model, tokens[:, :-1], tokens[:, 1:]


def interleaved(x: Tensor) -> Tensor:
    """A rotary embedding, its columns written into new memory."""
    angle, out = torch.arange(x.shape[1], dtype=DOUBLE).unsqueeze(1), torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * angle.cos() - x[..., 1::2] * angle.sin()
    out[..., 1::2] = x[..., 1::2] * angle.cos() + x[..., ::2] * angle.sin()
    return out


def of_complex_numbers(x: Tensor) -> Tensor:
    """A rotary embedding as a product of complex numbers."""
    turn = torch.polar(torch.ones(x.shape[1], 1, dtype=DOUBLE), torch.arange(x.shape[1], dtype=DOUBLE).unsqueeze(1))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def attention(rotary: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    def attend(s: nn.Module, x: Tensor) -> Tensor:
        return torch.softmax(rotary(x @ s.Q) @ rotary(x @ s.K).mT, -1) @ x

    return Formula(attend, Q=(4, 4), K=(4, 4)), torch.randn(2, 3, 4, dtype=DOUBLE), torch.randn(2, 3, 4, dtype=DOUBLE)


CASES = {
    "classifier": (classifier, "cross_entropy"),
    "hybridnorm": (lambda: block("hybridnorm"), "mse"),
    "peri, swiglu": (lambda: block("sandwich", activation="swiglu", norm="rmsnorm"), "mse"),
    "language model": (transformer, "cross_entropy"),
    "rotary embedding written in place": (lambda: attention(interleaved), "mse"),
    "torch's layer": (
        lambda: (
            nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True, dtype=DOUBLE),
            torch.randn(2, 3, 4, dtype=DOUBLE),
            torch.randn(2, 3, 4, dtype=DOUBLE),
        ),
        lambda z, t: (z - t).square().mean(),
    ),
}


def move(module: nn.Module, size: float = 0.3) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(size * torch.randn_like(p))


def changed(x: Tensor) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() else x.flip(0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_hessian_at_other_parameters_and_data(name: str) -> None:
    make, loss = CASES[name]
    module, x, t = make()
    f = hk.hessian_function(module, x, t, loss=loss)
    assert f.plan is not None, f.reason
    assert len(f.plan.steps) < f.plan.recorded / 2
    for inputs, target in ((None, None), (changed(x), None), (None, changed(t)), (changed(x), changed(t))):
        x, t = (x if inputs is None else inputs), (t if target is None else target)
        move(module)
        found, expected = f(inputs, target), hk.hessian(module, x, t, loss=loss)
        assert found.names == expected.names
        assert found.loss == pytest.approx(expected.loss, rel=1e-14)
        assert (found.matrix - expected.matrix).abs().max() <= 1e-13 * expected.matrix.abs().max()
        assert 0 <= found.asymmetry < 1e-12
    assert f.plans == 1


def test_the_last_data_are_those_of_the_next_call() -> None:
    module, x, t = block("pre")
    f = hk.hessian_function(module, x, t)
    other = changed(x)
    assert torch.equal(f(other).matrix, f().matrix)
    assert not torch.equal(f(x).matrix, f(other).matrix)


def test_refused_data_are_not_the_last_ones() -> None:
    module, x, t = block("pre")
    f = hk.hessian_function(module, x, t)
    expected = f().matrix
    for wrong in (x[:1], x.float(), x * torch.nan):
        with pytest.raises(InputError):
            f(wrong)
        assert torch.equal(f().matrix, expected)
    with pytest.raises(InputError):
        f(changed(x), t[:1])
    assert torch.equal(f().matrix, expected)


def test_a_result_does_not_move_with_what_comes_later() -> None:
    module, x, t = block("post")
    f = hk.hessian_function(module, x, t)
    move(module)
    expected = hk.hessian(module, x, t)
    found = f()
    before = found.matrix.clone()
    move(module)
    f(changed(x))
    assert torch.equal(found.matrix, before)
    assert (found.outer() - expected.outer()).abs().max() <= 1e-13 * expected.outer().abs().max()


def test_training_goes_on_between_evaluations() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), t).backward()
        optimizer.step()
        assert torch.allclose(f().matrix, hk.hessian(module, x, t, loss="cross_entropy").matrix, rtol=0, atol=1e-13)
    assert all(p.grad is not None for p in module.parameters())


def test_parameters_samples_and_types_as_in_hessian() -> None:
    module, x, t = block("pre")
    move(module)
    for options in ({"params": "*W_1"}, {"batch_size": 1}, {"loss": nn.MSELoss(reduction="sum")}):
        f = hk.hessian_function(module, x, t, **options)
        move(module)
        expected = hk.hessian(module, x, t, **options)
        assert (f().matrix - expected.matrix).abs().max() <= 1e-13 * expected.matrix.abs().max()
    single = module.float()
    f = hk.hessian_function(single, x.float(), t.float())
    move(single)
    expected = hk.hessian(single, x.float(), t.float())
    assert (f().matrix - expected.matrix).abs().max() <= 1e-5 * expected.matrix.abs().max()


def test_the_matrix_goes_into_a_tensor_of_the_users() -> None:
    module, x, t = block("pre")
    f = hk.hessian_function(module, x, t)
    n = sum(p.numel() for p in module.parameters())
    out = torch.full((n, n), 7.0, dtype=DOUBLE)
    assert f(out=out).matrix is out
    assert torch.equal(out, hk.hessian(module, x, t).matrix)
    with pytest.raises(InputError, match=r"out has shape \(2, 2\).*pass a contiguous tensor of shape"):
        f(out=torch.zeros(2, 2, dtype=DOUBLE))


def test_another_number_of_labels_is_planned_again() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    with pytest.raises(InputError):
        f(target=torch.full((5,), -100))  # no label counts: neither the old plan nor a new one is for that
    assert torch.equal(f().matrix, hk.hessian(module, x, t, loss="cross_entropy").matrix)
    t = torch.tensor([0, -100, 1, -100, 2])
    assert torch.allclose(f(target=t).matrix, hk.hessian(module, x, t, loss="cross_entropy").matrix, rtol=0, atol=1e-13)
    assert f.plans == 2


def test_a_constant_in_a_list_and_one_in_the_loss_have_their_present_values() -> None:
    held, weight = [draw(2, 4)], draw(3, seed=2)
    module = Formula(lambda m, x: (m.held[0] @ m.W) * x, W=(4, 3))  # the product of what is held with itself is in the Hessian
    module.held = held
    x, t, loss = draw(2, 3, seed=3), draw(2, 3), lambda z, t: (weight * (z - t) ** 2).sum()
    f = hk.hessian_function(module, x, t, loss=loss)
    for _ in range(2):
        held[0][0].mul_(2.0)
        weight.add_(1.0)
        found = f()
        assert largest_error(found, reverse_over_reverse(module, x, t, loss, found.names)) <= 1e-13
    assert f.plans == 1
    held[0].mul_(2.0)
    with pytest.raises(TraceError, match="two calls of the module on the same data give different losses"):
        found.outer()


@dataclass(frozen=True)
class Power:
    power: Tensor


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (2, 3, r"inputs\[1\] is 3, the plan is for 2"),
        (None, torch.ones(3, dtype=DOUBLE), r"inputs\[1\] is a Tensor, the plan is for a NoneType"),
        ({"a": 2, "b": 3}, {"a": 2}, r"inputs holds .*\['a'\], the plan is for .*\['b'\]"),
        (SimpleNamespace(power=2), SimpleNamespace(power=3), r"inputs\[1\] is another SimpleNamespace"),
        (Power(torch.tensor(2)), Power(torch.tensor(3)), r"inputs\[1\] is another Power"),
    ],
)
def test_arguments_that_are_no_tensors_are_those_of_the_plan(first: Any, second: Any, message: str) -> None:
    def run(s: nn.Module, x: Tensor, n: Any) -> Tensor:
        n = sum(n.values()) if isinstance(n, dict) else getattr(n, "power", 2 if n is None else n)
        return (x @ s.W) ** n

    module, x, t = Formula(run, W=(4, 3)), draw(5, 4).abs(), draw(5, 3)
    module.W.data.abs_()
    f = hk.hessian_function(module, (x, first), t)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{message}.*; make the function anew"):
            f((x + 1, second))
    assert torch.allclose(f((x + 1, first)).matrix, hk.hessian(module, (x + 1, first), t).matrix, rtol=0, atol=1e-11)


def test_entries_of_a_dict_are_known_by_their_keys() -> None:
    module, x, a, b = Formula(lambda s, x: x @ s.W, W=(4, 3)), draw(5, 4), draw(5, 3), draw(5, 3, seed=2)

    def loss(z: Tensor, t: dict[str, Tensor]) -> Tensor:
        return ((z - t["a"]) * t["b"]).exp().sum()

    f = hk.hessian_function(module, x, {"a": a, "b": b}, loss=loss)
    expected = hk.hessian(module, x, {"a": a, "b": b}, loss=loss).matrix
    assert torch.allclose(f(target={"b": b, "a": a}).matrix, expected, rtol=1e-12, atol=0)


def test_a_list_of_numbers_with_the_same_sum_is_planned_again() -> None:
    """Tokens of three experts, whose numbers Python reads: 2, 4, 6 and then 3, 3, 6 tokens up to each."""

    def mixture(s: nn.Module, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        ends = expert.bincount(minlength=3).cumsum(0).tolist()
        parts = [
            torch.tanh(x[order[start:end]] @ s.W[k]) for k, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        ]
        return torch.cat(parts)[order.argsort()]

    module, x = Formula(mixture, W=(3, 4, 2)), torch.randn(6, 4, dtype=DOUBLE)
    f = hk.hessian_function(module, (x, torch.tensor([0, 0, 1, 1, 2, 2])), torch.ones(6, 2, dtype=DOUBLE))
    inputs = (x, torch.tensor([0, 0, 0, 2, 2, 2]))
    expected = hk.hessian(module, inputs, torch.ones(6, 2, dtype=DOUBLE)).matrix
    assert torch.allclose(f(inputs).matrix, expected, rtol=0, atol=1e-13)
    assert f.plans == 2


def test_a_saturated_softmax_keeps_its_digits() -> None:
    module, x = Gated(), torch.randn(2, 4, 3, dtype=DOUBLE)
    f = hk.hessian_function(module, x, torch.zeros_like(x))
    with torch.no_grad():
        module.W.mul_(30)
    expected = hk.hessian(module, x, torch.zeros_like(x)).matrix
    assert torch.allclose(f().matrix, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def test_what_changed_is_refused_by_name() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    with pytest.raises(InputError, match=r"inputs has shape \(4, 4\), the plan is for \(5, 4\)"):
        f(x[:4])
    with pytest.raises(InputError, match=r"inputs has dtype torch.float32"):
        f(x.float())
    f(x)
    module[1].train()
    with pytest.raises(InputError, match=r"'1' is in training mode"):
        f()
    module.eval()
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    with pytest.raises(InputError, match=r"'0.weight' is another tensor now"):
        f()


def with_more(m: nn.Sequential) -> None:
    m[4].extra = nn.Parameter(torch.zeros(3, dtype=DOUBLE))  # without effect on loss and gradient yet
    m[4].register_forward_hook(lambda m, x, y: y + m.extra)


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        (len, with_more, r"'4.extra' requires grad now, and is not among those of the plan"),
        (lambda m: m[0].requires_grad_(False), lambda m: m[0].requires_grad_(True), r"'0.weight' requires grad now"),
        (len, lambda m: setattr(m[4], "bias", None), r"'4.bias' is no parameter of the module now"),
        (len, lambda m: nn.utils.parametrizations.weight_norm(m[0]), r"'0.weight' is no parameter of the module now"),
        (len, lambda m: setattr(m, "4", nn.Identity().eval()), r"'4.weight' is no parameter of the module now"),
    ],
)
def test_other_parameters_than_those_of_the_plan_are_refused(before: Any, change: Any, message: str) -> None:
    module, x, t = classifier()
    before(module)
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    change(module)
    with pytest.raises(InputError, match=message):
        f()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_a_copy_is_of_a_copy_of_the_module(copied: Callable[[Any], Any]) -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy", params=[module[0].weight])
    g, expected = copied(f), f().matrix
    move(module)
    assert torch.equal(g().matrix, expected)
    move(g.module)
    expected = hk.hessian(g.module, x, t, loss="cross_entropy", params="0.weight").matrix
    assert torch.allclose(g().matrix, expected, rtol=0, atol=1e-13)


def test_an_iterator_of_names_is_read_once() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy", params=iter(["0.weight", "4.*"]))
    move(module)
    expected = hk.hessian(module, x, t, loss="cross_entropy", params=["0.weight", "4.*"]).matrix
    assert torch.allclose(f().matrix, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("factor", [2.0, 200.0])
def test_a_module_that_computes_something_else_is_refused(factor: float) -> None:
    module, x = Gated(), torch.randn(2, 4, 3, dtype=DOUBLE)
    f = hk.hessian_function(module, x, torch.zeros_like(x))
    module.factor = factor
    with pytest.raises(TraceError, match=r"the module's own loss is .*its 'factor' has changed; make the function anew"):
        f()


def test_a_loss_with_other_settings_is_refused() -> None:
    """A plain cross entropy has a closed form, which knows nothing of them."""
    module, x, t = classifier()
    loss = nn.CrossEntropyLoss()
    f = hk.hessian_function(module, x, t, loss=loss)
    loss.label_smoothing = 0.1
    with pytest.raises(TraceError, match=r"own loss is .*its 'label_smoothing' has changed; make the function anew"):
        f()


def test_a_module_with_another_gradient_is_refused() -> None:
    """What is detached, or frozen, has the same loss."""
    stopped, x = {"yes": False}, torch.randn(3, 4, dtype=DOUBLE)

    def run(s: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(x @ s.W)
        return (y.detach() if stopped["yes"] else y) @ s.V

    net = Formula(run, W=(4, 3), V=(3, 2))
    f = hk.hessian_function(net, x, torch.zeros(3, 2, dtype=DOUBLE))
    f()
    stopped["yes"] = True
    with pytest.raises(TraceError, match=r"own gradient is not that of the plan: .*; make the function anew"):
        f()
    stopped["yes"] = False
    move(net)
    assert torch.allclose(f().matrix, hk.hessian(net, x, torch.zeros(3, 2, dtype=DOUBLE)).matrix, rtol=0, atol=1e-13)
    net.W.requires_grad_(False)
    with pytest.raises(InputError, match=r"the parameter 'W' does not require grad now"):
        f()


def test_a_gradient_that_cancels_is_no_other_gradient() -> None:
    """At a minimum the gradient is rounding."""
    layer, x = nn.Linear(4, 3, dtype=DOUBLE), torch.randn(6, 4, dtype=DOUBLE)
    t = torch.randn(6, 3, dtype=DOUBLE)
    f = hk.hessian_function(layer, x, t)
    rows = torch.cat([x, torch.ones(6, 1, dtype=DOUBLE)], 1)
    best = torch.linalg.lstsq(rows, t).solution.T
    with torch.no_grad():
        layer.weight.copy_(best[:, :4])
        layer.bias.copy_(best[:, 4])
    assert torch.allclose(f().matrix[:12, :12], 2 / 18 * torch.kron(torch.eye(3, dtype=DOUBLE), x.T @ x), rtol=0, atol=1e-13)


def test_errors_of_a_later_call_are_those_of_hessian() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    with pytest.raises(InputError, match=r"labels lie in \[0, 7\], expected 0 to 2"):
        f(target=t.where(t != 2, 7))
    f = hk.hessian_function(
        module, x, torch.rand(5, 3, dtype=DOUBLE), loss=lambda z, t: nn.functional.binary_cross_entropy(z.sigmoid(), t)
    )
    with pytest.raises(InputError, match=r"the loss, called as .*, raised: all elements of target should be between 0 and 1"):
        f(target=torch.full((5, 3), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize(
    ("form", "reason"),
    [(of_complex_numbers, "conjugate"), (nn.RReLU().eval(), "rrelu_with_noise writes into an argument and returns another")],
)
def test_what_cannot_be_planned_is_made_anew(form: Callable[[Tensor], Tensor], reason: str) -> None:
    module, x, t = attention(form)
    f = hk.hessian_function(module, x, t)
    assert f.plan is None
    assert reason in f.reason
    move(module)
    assert torch.equal(f().matrix, hk.hessian(module, x, t).matrix)


def test_buffers_move_with_the_module() -> None:
    module, x, t = classifier()
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    module[1].running_var.mul_(3.0)
    expected = hk.hessian(module, x, t, loss="cross_entropy").matrix
    assert torch.allclose(f().matrix, expected, rtol=0, atol=1e-13)


def test_several_batches_and_not_finite_values_are_refused() -> None:
    module, x, t = classifier()
    with pytest.raises(InputError, match="several batches; pass one"):
        hk.hessian_function(module, [(x, t), (x, t)], loss="cross_entropy")
    f = hk.hessian_function(module, x, t, loss="cross_entropy")
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"hessian_function: '0.weight' contains NaN"):
        f()


def test_a_second_derivative_that_is_infinite_is_named_with_its_block() -> None:
    """Where loss and gradient are finite, after an evaluation that has been compared with hessian()."""

    def bent(z: Tensor, t: Tensor) -> Tensor:
        return (z.abs() ** 1.5).sum()

    module, x = nn.Linear(3, 2, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    nn.init.zeros_(module.bias)  # it moves the row of zeros
    f = hk.hessian_function(module, x, torch.zeros(4, 2, dtype=DOUBLE), loss=bent)
    f(changed(x))
    x[1] = 0
    with pytest.raises(InputError, match=r"hessian_function: the block \('weight', 'weight'\) is NaN or infinite"):
        f(x)


def test_without_room_for_a_plan_it_is_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hessiankit.curvature.hessian_function.SHARE", 0.0)
    module, x, t = block("pre")
    f = hk.hessian_function(module, x, t)
    assert f.plan is None
    assert "more memory" in f.reason
    move(module)
    assert torch.equal(f().matrix, hk.hessian(module, x, t).matrix)
    assert "without a plan" in str(f)


def test_it_prints_what_it_runs() -> None:
    module, x, t = block("pre")
    f = hk.hessian_function(module, x, t)
    assert "operations of" in repr(f)
    assert "bmm" in f.table()
    assert "multiplications" in str(f)
    assert str(f).endswith(str(f.plan))
