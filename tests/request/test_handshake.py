"""The trace has the loss and gradient of the module itself, or an error names what differs; buffers that a call writes are put back."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, gradient_twice, mse, randomised, reverse_over_reverse
from operator_cases import error
from readings import assert_readings, in_turn
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.primitives.linear import Linear
from hessiankit.primitives.primitive import Linearised, LinearisedEntrywise, into

X, T = draw(6, 4), draw(6, 3, seed=7)

RESULTS: dict[str, Callable[..., Any]] = {
    "hessian": lambda *a, **k: hk.hessian(*a, **k).matrix,
    "lazy": lambda *a, **k: hk.hessian(*a, lazy=True, **k).block("0.weight", "2.weight"),
    "outer": lambda *a, **k: hk.hessian(*a, lazy=True, **k).outer(),
    "operator": lambda *a, **k: hk.hessian_operator(*a, **k),
    "ggn": lambda *a, **k: hk.hessian_operator(*a, kind="ggn", **k),
    "diagonal": lambda *a, **k: hk.hessian_diagonal(*a, **k),
    "norms": lambda *a, **k: hk.frobenius_norms(*a, **k),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class _Halved:
    """A linearised primitive that pulls back half of every covector."""

    def __init__(self, right: Linearised) -> None:
        self._right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def pull(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(None if c is None else c / 2 for c in self._right.pull(*args, **kwargs))

    def pull_into(self, bar: Any, tangents: Any, sums: Any) -> Any:
        return into(sums, self.pull(bar, tangents))


@pytest.mark.parametrize("name", RESULTS)
def test_a_wrong_derivative_of_a_primitive_stops_every_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linearise = Linear.linearise
    monkeypatch.setattr(Linear, "linearise", lambda self, *args: _Halved(linearise(self, *args)))
    with pytest.raises(hk.TraceError, match=r"the gradient with respect to '[02]\.(weight|bias)', as traced, is off by"):
        RESULTS[name](network(), X, T)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.float32, 1e-2)])
def test_a_wrong_value_stops_a_result(dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from hessiankit.primitives.loss import MeanSquaredError

    value = MeanSquaredError.value
    monkeypatch.setattr(MeanSquaredError, "value", lambda self, z, t: value(self, z, t) + error)
    with pytest.raises(hk.TraceError, match="the loss, as traced, is off by"):
        hk.hessian(network().to(dtype), X.to(dtype), T.to(dtype))


def test_without_it_the_result_says_so() -> None:
    module = network()
    H = hk.hessian(module, X, T, handshake=False)
    operator = hk.hessian_operator(module, X, T, handshake=False)
    diagonal = hk.hessian_diagonal(module, X, T, handshake=False)
    norms = hk.frobenius_norms(module, X, T, handshake=False)
    assert not any(found.handshake for found in (H, operator, diagonal, norms))
    for found in (H, diagonal, norms):
        assert "not compared with the module's own gradient" in found.table()
    compared = hk.hessian(module, X, T)
    assert compared.handshake
    assert "not compared" not in compared.table()
    assert torch.equal(compared.matrix, H.matrix)


CALLS: list[int] = []
"""Where nothing puts what is appended back."""


class _Counted(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return super().forward(x)


@pytest.mark.first_order
@pytest.mark.parametrize("handshake", [True, False])
def test_the_module_is_called_once_as_it_is_and_once_to_be_traced(handshake: bool) -> None:
    module = network()
    module[1] = _Counted()
    CALLS.clear()
    hk.hessian_operator(module, X, T, handshake=handshake)
    assert len(CALLS) == 2


def test_a_gradient_of_nothing_but_rounding_is_no_difference() -> None:
    """At a minimum the gradient is what cancellation leaves, and the two routes leave other digits of it."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    with torch.no_grad():
        ones = torch.cat([X, torch.ones(6, 1).double()], 1)
        best = torch.linalg.lstsq(ones, T).solution
        layer.weight.copy_(best[:4].T)
        layer.bias.copy_(best[4])
    found = hk.hessian(layer, X, T).matrix
    expected = reverse_over_reverse(layer, X, T, mse)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_row_that_an_embedding_leaves_out_of_the_gradient_is_a_constant() -> None:
    """The row of a padding_idx: torch's gradient does not know it, and neither does the Hessian."""
    torch.manual_seed(0)
    padded = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Tanh(), nn.Linear(4, 3)).double()
    plain = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        padded[0].weight.normal_()
    plain.load_state_dict(padded.state_dict())
    tokens = torch.tensor([0, 1, 2, 1, 4, 3])
    expected = hk.hessian(plain, tokens, T).matrix.clone()
    assert expected[4:8].any()
    expected[4:8], expected[:, 4:8] = 0, 0
    found = hk.hessian(padded, tokens, T).matrix
    assert torch.equal(found == 0, expected == 0)
    assert (found - expected).abs().max() <= 1e-15


def test_what_a_later_gradient_shows_to_have_changed_is_refused() -> None:
    """A flag that detaches leaves the loss as it was; the rest of a result is computed later."""
    stopped = _FLAGS["stopped"]
    module = Formula(_with_a_flag, W=(4, 3), V=(3, 3))
    found, lazy = hk.hessian(module, X, T), hk.hessian(module, X, T, lazy=True)
    expected = found.outer()
    stopped.add("yes")
    for compute in (found.outer, lambda: lazy.matrix):
        with pytest.raises(hk.TraceError, match="two calls of the module on the same data give different gradients in 'W'"):
            compute()
    stopped.clear()
    assert torch.equal(found.outer(), expected)


_FLAGS: dict[str, set[str]] = {"stopped": set()}


def _with_a_flag(s: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    return (y.detach() if _FLAGS["stopped"] else y) @ s.V


CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])


def expected_of(module: nn.Module, x: Tensor, labels: Tensor = CLASSES) -> Tensor:
    """The Hessian of cross entropy by autograd twice, of a copy, whose buffers may change."""
    twin = deepcopy(module)
    return gradient_twice(cross_entropy(twin(x), labels), list(twin.parameters()))


def norms(**options: Any) -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "rows": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Linear(4, 2)), draw(6, 3)),
        "images, without gains": (
            nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, affine=False, **options), nn.GELU(), nn.Flatten(), nn.Linear(12, 2)),
            draw(6, 2, 3, 3),
        ),
        "instances": (
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, **options), nn.SiLU(), nn.Flatten(), nn.Linear(9, 2)),
            draw(6, 2, 4),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows", {}),
        ("rows", {"momentum": None}),
        ("images, without gains", {"track_running_stats": False}),
        ("instances", {"track_running_stats": True}),
    ],
)
def test_norms_in_training(name: str, options: dict[str, Any]) -> None:
    module, x = norms(**options)[name]
    randomised(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    expected = expected_of(module, x)
    results = assert_readings(expected, module, x, CLASSES, loss="cross_entropy", floor=1e-12)
    assert results["hessian"].fallbacks == ()
    in_chunks = hk.hessian(module, x, CLASSES, loss="cross_entropy", batch_size=2, handshake=False)
    assert error(in_chunks.matrix, expected) <= 1e-12
    assert error(results["hessian_operator"].to_matrix(), expected) <= 1e-12
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.training


def test_parts_of_a_batch_are_refused() -> None:
    module, x = norms()["rows"]
    randomised(module)
    for handshake in (True, False):
        with pytest.raises(hk.TraceError, match=r"hessian_operator: .* depend on each other, as in a batch norm in training"):
            hk.hessian_operator(module, x, CLASSES, loss="cross_entropy", micro_batch=2, handshake=handshake)


def test_several_batches_each_have_their_own_statistics() -> None:
    module, x = norms()["rows"]
    randomised(module)
    expected = expected_of(module, x[:2], CLASSES[:2]) / 3 + 2 * expected_of(module, x[2:], CLASSES[2:]) / 3
    batches = [(x[:2], CLASSES[:2]), (x[2:], CLASSES[2:])]
    assert_readings(expected, module, batches, loss="cross_entropy", readings=in_turn(0), floor=1e-12)


# What is zero up to rounding ----------------------------------------------------------------------------------------------


def shifted(s: Formula, x: Tensor) -> Tensor:
    """Logits with the same shift in each class of a row, which no softmax or norm sees."""
    return x @ s.W + torch.tanh(x @ s.c)[..., None]


def rotated(s: Formula, x: Tensor) -> Tensor:
    """The length of a pair of values, rotated by c."""
    a, b = (x @ s.W)[..., :2].unbind(-1)
    turned = torch.stack([a * s.c.cos() - b * s.c.sin(), a * s.c.sin() + b * s.c.cos()], -1)
    return turned.norm(dim=-1, keepdim=True) * x


def attending(s: Formula, x: Tensor) -> Tensor:
    return torch.softmax((x @ s.W) @ (x @ s.W + s.c).mT, -1) @ x


CANCELLING: dict[str, tuple[Callable[[Formula, Tensor], Tensor], tuple[int, ...]]] = {
    "a shift of logits": (lambda s, x: torch.log_softmax(shifted(s, x), -1), (4,)),
    "a shift before a norm": (lambda s, x: nn.functional.layer_norm(shifted(s, x), (4,)), (4,)),
    "a scale before a norm": (lambda s, x: nn.functional.layer_norm(x @ s.W * s.c.exp(), (4,), eps=1e-30), ()),
    "a bias before a batch norm": (
        lambda s, x: nn.functional.batch_norm((x @ s.W + s.c).flatten(0, 1), None, None, training=True).view(x.shape), (4,)
    ),
    "a bias of keys": (attending, (4,)),
    "a rotation": (rotated, ()),
    "log exp": (lambda s, x: (x @ s.W + s.c).exp().log() - x @ s.W - s.c + x, (4,)),
    "a difference": (lambda s, x: (x @ s.W * s.c).exp() - (x @ s.W * s.c).exp() + x, (4,)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CANCELLING)
def test_derivatives_that_are_zero_up_to_rounding_are_no_error(name: str, dtype: torch.dtype) -> None:
    """With respect to c: the loss does not depend on it, and terms of the size of the loss cancel."""
    f, shape = CANCELLING[name]
    for seed in range(6):
        module = Formula(f, W=(4, 4), c=shape).to(dtype)
        for k, p in enumerate(module.parameters()):
            p.data = draw(p.numel(), seed=10 * seed + k).view(p.shape).to(dtype)
        x, t = draw(2, 3, 4, seed=seed).to(dtype), draw(2, 3, 4, seed=seed + 50).to(dtype)
        operator = hk.hessian_operator(module, x, t, params="c")
        operator.symmetry_error  # noqa: B018
        found = [hk.hessian(module, x, t, params="c").matrix, operator.to_matrix()]
        found += [hk.hessian_diagonal(module, x, t, params="c").flat, hk.frobenius_norms(module, x, t, params="c").matrix]
        assert all(float(one.abs().max()) <= 1e5 * torch.finfo(dtype).eps for one in found)


# The handshake of second order --------------------------------------------------------------------------------------------

SECOND = {"handshake": "second order"}
CALLS_OF_SECOND_ORDER = {
    "hessian": lambda *a, **k: hk.hessian(*a, **k).matrix,
    "lazy": lambda *a, **k: hk.hessian(*a, lazy=True, **k).matrix,
    "block": lambda *a, **k: hk.hessian(*a, lazy=True, **k).block("0.weight", "0.bias"),
    "file": lambda *a, **k: hk.hessian(*a, out="H.npy", **k).matrix,
    "operator": lambda *a, **k: hk.hessian_operator(*a, **k).to_matrix(),
    "lean operator": lambda *a, **k: hk.hessian_operator(*a, micro_batch=2, **k).to_matrix(),
}


@pytest.mark.first_order  # the default stays as users have it
@pytest.mark.parametrize("name", CALLS_OF_SECOND_ORDER)
def test_a_wrong_second_derivative_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    read = CALLS_OF_SECOND_ORDER[name]
    right = read(network(), X, T, **SECOND)
    made = LinearisedEntrywise.__init__

    def bent_too_much(self: LinearisedEntrywise, *args: Any) -> None:
        made(self, *args[:-1], None if args[-1] is None else 1.001 * args[-1])

    monkeypatch.setattr(LinearisedEntrywise, "__init__", bent_too_much)
    (tmp_path / "H.npy").unlink(missing_ok=True)
    wrong = read(network(), X, T)
    assert 1e-6 < error(wrong, right) < 1e-2
    (tmp_path / "H.npy").unlink(missing_ok=True)
    with pytest.raises(
        hk.TraceError, match=r"H v for a generic vector v differs from central differences of .* own gradient, by"
    ):
        read(network(), X, T, **SECOND)


@pytest.mark.first_order
def test_what_second_order_costs_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    module[1] = _Counted()
    for options, calls in (({}, 2), (SECOND, 5)):  # its own call and its trace; what it holds constant, and two gradients
        CALLS.clear()
        hk.hessian_operator(module, [(X, T)], **options)
        assert len(CALLS) == calls
    monkeypatch.setenv("HESSIANKIT_HANDSHAKE", "second order")
    CALLS.clear()
    hk.hessian_operator(module, X, T)
    assert len(CALLS) == 5
    kink = Formula(lambda m, x: torch.relu(x @ m.W), W=(4, 3))
    kink.W.data.zero_()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: hk.hessian(kink, X, T, **SECOND), "a second derivative is wrong, or the loss has a kink here"),
        (lambda: hk.hessian(module, X, T, handshake="third order"), "handshake='third order' is not known; pass True, False or"),
        (lambda: hk.hessian_operator(module, X, T, kind="ggn", **SECOND), "compares products with the Hessian; with kind='ggn'"),
    ]
    for call, message in refused:
        with pytest.raises(hk.HessiankitError, match=message):
            call()
