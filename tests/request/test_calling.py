"""Inputs by position and by keyword, outputs as tensors and objects, against reverse-over-reverse autograd."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import (
    Formula,
    assert_exact,
    assert_one_clear_error,
    cross_entropy,
    draw,
    gauss_newton,
    mse,
    reverse_over_reverse,
)
from loss_reference import Padded, by_autograd, sequences, token_loss
from operator_cases import EXACT, error
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hessiankit as hk

IDS, MASK, LABELS = sequences()
KEYWORDS = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("inputs", "returns"),
    [
        (UserDict(KEYWORDS), "dict"),
        ({"attention_mask": MASK, "input_ids": IDS}, "tensor"),
        ((IDS, MASK), "object"),
        ([IDS, MASK], "tensor"),
    ],
)
def test_padded_tokens(inputs: Any, returns: str) -> None:
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK), LABELS))
    assert_readings(expected, Padded(returns), inputs, LABELS, loss="cross_entropy", readings=in_turn(0))


@pytest.mark.parametrize("returns", ["dict", "object", "loss"])
def test_module_that_returns_its_loss(returns: str) -> None:
    inputs, module = {**KEYWORDS, "labels": LABELS}, Padded(returns)
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK)[:, :-1], LABELS[:, 1:]))
    found = assert_readings(expected, module, inputs, loss=None, readings=in_turn(0))["hessian"]
    assert found.loss == pytest.approx(float(Padded("loss")(**inputs).detach()), rel=1e-14)
    if returns == "loss":
        with pytest.raises(hk.InputError, match=r"kind='ggn' needs the module's output .* pass loss="):
            found.outer()
        return
    expected = by_gauss_newton(lambda z: token_loss(z[:, :-1], LABELS[:, 1:]))
    assert_readings(expected, module, inputs, loss=None, kind="ggn", readings=in_turn(0))
    report = hk.approximations(module, inputs, loss=None, against="ggn", of=["diagonal"])
    assert report.frobenius == pytest.approx(float(expected.norm()), rel=1e-10)


@pytest.mark.parametrize("returns", ["dict", "object"])
def test_callable_is_given_what_the_module_returns(returns: str) -> None:
    def own(outputs: Any, target: dict[str, Tensor]) -> Tensor:
        logits = outputs["logits"] if returns == "dict" else outputs.logits
        return token_loss(logits, target["labels"]) + (logits * target["weight"]).square().mean()

    def of_logits(z: Tensor) -> Tensor:
        return token_loss(z, LABELS) + (z * target["weight"]).square().mean()

    target, readings = {"labels": LABELS, "weight": draw(5)}, in_turn(returns == "dict")
    expected = by_autograd(Padded(), lambda m: of_logits(m(IDS, MASK)))
    assert_readings(expected, Padded(returns), KEYWORDS, target, loss=own, readings=readings)
    assert_readings(by_gauss_newton(of_logits), Padded(returns), KEYWORDS, target, loss=own, kind="ggn", readings=readings)


def by_gauss_newton(loss: Callable[[Tensor], Tensor]) -> Tensor:
    return gauss_newton(Padded(), (IDS, MASK), None, lambda z, _: loss(z))


def test_a_loss_that_more_than_the_logits_enter_has_no_output_layer() -> None:
    module = Padded("object")

    def own(outputs: Any, labels: Tensor) -> Tensor:
        return token_loss(outputs.logits, labels) + next(iter(module.parameters())).square().sum()

    assert hk.hessian(module, KEYWORDS, LABELS, loss=own).matrix.shape[0] > 0
    with pytest.raises(hk.InputError, match="a loss that nothing else of the module enters"):
        hk.hessian_operator(module, KEYWORDS, LABELS, loss=own, kind="ggn")
    with pytest.raises(hk.InputError, match="a loss that nothing else of the module enters"):
        hk.hessian(module, KEYWORDS, LABELS, loss=own).outer()


TORCHS: dict[str, Any] = {
    "a module": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100),
    "a function with options": partial(F.cross_entropy, label_smoothing=0.1),
}


def returned(kind: Callable[[Tensor, Tensor | None], Any]) -> Formula:
    """z = tanh(x W^T + b) V^T + c, in whatever ``kind`` makes of it and of the loss, if there are labels."""

    def forward(m: Any, x: Tensor, labels: Tensor | None = None) -> Any:
        z = m.last(torch.tanh(m.first(x)))
        return kind(z, None if labels is None else F.cross_entropy(z, labels))

    return Formula(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2))


PLAIN = returned(lambda z, _: z)


KINDS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "object": lambda z, value: SimpleNamespace(logits=z, loss=value),
    "logits first": lambda z, value: (z, value),
    "loss first": lambda z, value: (value, z),
}
SAMPLES: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "object": lambda z, _: SimpleNamespace(sample=z, steps=3, mask=z > 0),
    "dict": lambda z, value: {"prediction": z, "loss": value},
}
X, T, CLASSES = draw(5, 3), draw(5, 2, seed=2), torch.tensor([0, 1, 1, 0, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TORCHS)
def test_losses_of_torch_read_the_logits(name: str, kind: str) -> None:
    loss = TORCHS[name]
    for part, of in (("hessian", reverse_over_reverse), ("ggn", gauss_newton)):
        expected = of(PLAIN, X, CLASSES, loss)
        assert_readings(expected, returned(KINDS[kind]), X, CLASSES, loss=loss, kind=part, readings=in_turn(0))


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_only_tensor_of_an_output_is_read_as_logits(kind: str) -> None:
    """As in diffusers, whose output objects have a ``sample``."""
    module = returned(SAMPLES[kind])
    assert error(hk.hessian(module, X, T, loss="mse").matrix, reverse_over_reverse(PLAIN, X, T, mse)) <= EXACT

    def own(outputs: Any, target: Tensor) -> Tensor:
        return mse(outputs.sample if kind == "object" else outputs["prediction"], target)

    expected = gauss_newton(PLAIN, X, T, mse)
    assert_readings(expected, module, X, T, loss=own, kind="ggn", readings=in_turn(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_what_the_module_returns(kind: str) -> None:
    module, expected = returned(KINDS[kind]), by_autograd(PLAIN, lambda m: F.cross_entropy(m(X), CLASSES))
    batches = [(X[:2], CLASSES[:2]), (X[2:], CLASSES[2:])]
    for data, options in (
        (((X, CLASSES),), {"loss": None}),
        ((X, CLASSES), {"loss": "cross_entropy"}),
        ((batches,), {"loss": None, "weights": [2, 3]}),
    ):
        assert error(hk.hessian(module, *data, **options).matrix, expected) <= EXACT


@pytest.mark.parametrize("listed", [False, True])
def test_a_loader_of_lists_of_inputs(listed: bool) -> None:
    a, b = draw(5, 3), draw(5, 3, seed=2)
    module = Formula(lambda m, *x: m.layer(x[0][0] * x[0][1] if listed else x[0] * x[1]), layer=nn.Linear(3, 2))
    module.forward = (lambda pair: module.f(module, pair)) if listed else (lambda a, b: module.f(module, a, b))
    expected = by_autograd(module, lambda m: F.cross_entropy(m.layer(a * b), CLASSES))
    samples = [((a[k], b[k]), CLASSES[k]) for k in range(5)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    assert_readings(expected, module, loader, loss="cross_entropy", readings=in_turn(0))
    assert error(hk.hessian(module, [a, b], CLASSES, loss="cross_entropy", batch_size=1).matrix, expected) <= EXACT
    assert listed or hk.check(module, [a, b], CLASSES, loss="cross_entropy")


@pytest.mark.parametrize("of_inputs", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_parameters", [torch.contiguous_format, torch.channels_last])
def test_images_and_weights_with_channels_last(of_inputs: torch.memory_format, of_parameters: torch.memory_format) -> None:
    """And as views: every second pixel of a larger image, of which a batch is cut."""
    convolutions = {"first": nn.Conv2d(2, 3, 2), "last": nn.Conv2d(3, 2, 2)}
    module = Formula(lambda m, x: m.last(torch.tanh(m.first(x))).flatten(1), **convolutions)
    x, target = draw(3, 2, 8, 8)[1:, :, ::2, ::2], draw(2, 8)
    expected = reverse_over_reverse(module, x, target, mse)
    module, x = module.to(memory_format=of_parameters), x.to(memory_format=of_inputs)
    assert module.first.weight.is_contiguous() == (of_parameters == torch.contiguous_format)
    assert_readings(expected, module, x, target)
    assert error(hk.hessian(module, x, target, batch_size=1).matrix, expected) <= EXACT


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5])
def test_labels_of_all_tokens_in_one_row(batch_size: int | None) -> None:
    """Inputs (B, T), logits (B T, C) and labels (B T,): samples are not cut by their labels."""
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 3)}
    module = Formula(lambda m, x: m.last(torch.tanh(m.first(x)).cumsum(1)).flatten(0, 1), **parts)
    x, labels = draw(3, 2, 3), torch.tensor([0, 2, -100, 1, 1, 0])
    expected = reverse_over_reverse(module, x, labels, cross_entropy)
    options: dict[str, Any] = {"loss": "cross_entropy", "batch_size": batch_size}
    assert error(hk.hessian(module, x, labels, **options).matrix, expected) <= EXACT
    assert error(hk.hessian_diagonal(module, x, labels, **options).flat, expected.diagonal()) <= EXACT
    assert hk.frobenius_norms(module, x, labels, **options).whole == pytest.approx(float(expected.norm()), rel=1e-12)
    found = hk.approximations(module, x, labels, of=["diagonal", "kfac"], **options)
    assert error(found["diagonal"].operator.to_matrix(), torch.diag(expected.diagonal())) <= EXACT


def test_nested_containers_and_constants() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float, flag: bool | None = None) -> Tensor:
            return torch.tanh(self.layer(pair[0]) * scale + pair[1]["shift"])

    module, x, shift, t = Nested(), draw(3, 4), draw(3, 3, seed=2), draw(3, 3, seed=3)
    expected = by_autograd(module, lambda m: (torch.tanh(m.layer(x) * 0.5 + shift) - t).square().mean())
    inputs = {"pair": (x, {"shift": shift}), "scale": 0.5, "flag": None}
    for batch_size in (None, 1):
        assert error(hk.hessian(module, inputs, t, batch_size=batch_size).matrix, expected) <= EXACT
    with pytest.raises(hk.InputError, match=r"inputs\['pair'\]\[1\]\['shift'\] is torch.float32, the parameters are"):
        hk.hessian(module, {**inputs, "pair": (x, {"shift": shift.float()})}, t)


def test_mask_of_minus_infinity_as_an_input_and_as_a_buffer() -> None:
    module, x, t = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True).double(), draw(2, 3, 4), draw(2, 3, 4, seed=2)
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    assert_exact(module, (x, mask), t)
    own = Formula(lambda m, x: torch.softmax(m.lin(x) @ x.mT + m.mask, -1) @ x, lin=nn.Linear(4, 4))
    own.register_buffer("mask", mask)
    assert_exact(own, x, t)


def test_check_takes_keywords_and_output_objects() -> None:
    report = hk.check(Padded("object"), UserDict(KEYWORDS), LABELS, loss="cross_entropy", params="*.weight")
    assert report, report
    assert report.hessian.names == ("embedding.weight", "query.weight", "key.weight", "head.weight")
    assert hk.check(Padded("dict"), {**KEYWORDS, "labels": LABELS}, loss=None, params=["query.weight"])


@pytest.mark.parametrize("handshake", [False, True])
def test_reentrant_checkpoints_are_refused_with_what_helps(handshake: bool) -> None:
    """With the first layer in a checkpoint that gets the parameters, or reads them itself."""

    def first(m: Any, x: Tensor, reentrant: bool, given: bool) -> Tensor:
        if given:
            return checkpoint(lambda W, b: torch.tanh(F.linear(x, W, b)), *m.first.parameters(), use_reentrant=reentrant)  # type: ignore[no-any-return]
        return checkpoint(lambda x: torch.tanh(m.first(x)), x.clone().requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    def checkpointed(**options: bool) -> Formula:
        return Formula(lambda m, x: m.last(first(m, x, **options)), first=nn.Linear(3, 4), last=nn.Linear(4, 2))

    for given in (False, True):
        with pytest.raises(hk.InputError, match=r"a reentrant checkpoint hides .*; pass use_reentrant=False"):
            hk.hessian(checkpointed(given=given, reentrant=True), X, T, handshake=handshake)
        found = hk.hessian(checkpointed(given=given, reentrant=False), X, T, handshake=handshake).matrix
        assert error(found, reverse_over_reverse(PLAIN, X, T, mse)) <= EXACT


class Quantised(Tensor):
    """Integers and a scale, as torchao keeps them: a tensor without memory of its own."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantised:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def dequantize(self) -> Tensor:
        return self.codes * self.scale  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        return function(*(x.dequantize() if isinstance(x, cls) else x for x in args), **(kwargs or {}))


def quantised(*, parameter: bool) -> nn.Module:
    module = Formula(lambda s, x: F.linear(F.linear(x, s.w), s.W), W=(2, 3))
    w = Quantised(torch.arange(9).reshape(3, 3), torch.tensor(0.1).double())
    module.register_parameter("w", nn.Parameter(w, requires_grad=False)) if parameter else module.register_buffer("w", w)
    assert torch.autograd.grad(module(X).sum(), module.W)
    return module


class Weighted(nn.Module):
    """The loss of a task with a learned uncertainty."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor(0.3).double(), requires_grad=trained)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return torch.exp(-self.v) * mse(z, t) + self.v / 2


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = PLAIN, Weighted()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.criterion(self.net(x), t)  # type: ignore[no-any-return]


GLOBAL = Weighted()


def test_trained_parameters_of_a_loss_are_named() -> None:
    inside, temperature = Weighted(), nn.Parameter(torch.ones(()).double())
    losses: dict[str, Any] = {
        "v": inside,
        "inside.v": lambda z, t: inside(z, t),
        "GLOBAL.v": lambda z, t: GLOBAL(z, t),
        "temperature": lambda z, t: mse(z / temperature, t),
    }
    for name, loss in losses.items():
        for call in (hk.hessian, hk.hessian_operator, hk.hessian_diagonal, hk.frobenius_norms):
            with pytest.warns(
                UserWarning, match=f"parameters of the loss are constants here: {name}; a module that returns its loss"
            ):
                call(PLAIN, X, T, loss=loss)
    frozen, module = Weighted(trained=False), WithLoss()
    hk.hessian(PLAIN, X, T, loss=frozen)
    hk.hessian(PLAIN, X, T, loss=lambda z, t: mse(z, t + inside(z, t).detach()))  # a teacher
    hk.hessian(module.net, X, T, loss=lambda z, t: mse(z, t) + 1e-3 * module.net.last.weight.square().sum())
    expected = by_autograd(module, lambda m: m(X, T))
    assert error(hk.hessian(module, (X, T), loss=None).matrix, expected) <= EXACT


JAGGED = torch.nested.nested_tensor([draw(2, 3), draw(3, 3)], layout=torch.jagged)
ENTROPY = {"loss": "cross_entropy"}
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "integer inputs": (lambda: hk.hessian(PLAIN, X.long(), T), r"raised RuntimeError: .*dtype.*; inputs are torch.int64 but the module has no embedding to look them up in, pass torch.float64"),
    "complex parameters": (lambda: hk.hessian(nn.Linear(3, 2, dtype=torch.complex128), X, T), "expected real ones, such as the real and imaginary parts"),
    "jagged inputs": (lambda: hk.hessian(PLAIN, JAGGED, T), r"inputs is a nested tensor .* e.g. torch.nested.to_padded_tensor\(inputs, 0.0\)"),
    "a quantised parameter": (lambda: hk.hessian(quantised(parameter=True), X, T), "w is a Quantised, a tensor that keeps its numbers in others .* the dequantised weights"),
    "a quantised buffer": (lambda: hk.hessian_operator(quantised(parameter=False), X, T), "w is a Quantised, a tensor that keeps its numbers in others"),
    "a tuple": (lambda: hk.hessian(returned(lambda z, _: (z, z, 1)), X, T), r"returned tuple \(of Tensor, Tensor, int\), expected one tensor"),
    "a tuple of two": (lambda: hk.hessian(returned(lambda z, _: (z, z)), X, loss=None), r"returned tuple \(of Tensor, Tensor\), .* or a tuple with one number"),
    "a dict of two tensors": (lambda: hk.hessian(returned(lambda z, _: {"out": z, "z": z}), X, T), r"dict \(with 'out', 'z'\), .* dict with 'logits', or .* with one floating-point tensor"),
    "an object of two tensors": (lambda: hk.hessian(returned(lambda z, _: SimpleNamespace(a=z, b=z)), X, T), r"SimpleNamespace \(with 'a', 'b'\), .* dict with 'logits'"),
    "the class of a loss": (lambda: hk.hessian(PLAIN, X, CLASSES, loss=nn.CrossEntropyLoss), r"loss is the class CrossEntropyLoss; pass an instance, such as CrossEntropyLoss\(\)"),
    "logits that are None": (lambda: hk.hessian(returned(lambda z, _: {"logits": None}), X, T), "dict whose 'logits' is None"),
    "no labels": (lambda: hk.hessian(Padded("object"), KEYWORDS, loss=None), "whose 'loss' is None, .* pass the labels"),
    "no target": (lambda: hk.hessian(Padded(), KEYWORDS, **ENTROPY), "loss='cross_entropy' needs a target"),
    "target without use": (lambda: hk.hessian(Padded("loss"), {**KEYWORDS, "labels": LABELS}, LABELS, loss=None), "would not be used"),
    "unknown keyword": (lambda: hk.hessian(Padded(), {"ids": IDS}, LABELS, **ENTROPY), r"inputs\['ids'\] \(4, 5\), raised TypeError: .*unexpected keyword"),
    "key that is no string": (lambda: hk.hessian(Padded(), {0: IDS}, LABELS, **ENTROPY), "has the key 0"),
    "dtype of one key": (lambda: hk.hessian(Padded(), {**KEYWORDS, "attention_mask": MASK.float()}, LABELS, **ENTROPY), r"inputs\['attention_mask'\] is torch.float32"),
    "infinity in an input": (lambda: hk.hessian(PLAIN, X.index_fill(0, torch.tensor(1), -torch.inf), T), r"contains NaN or infinity, first at index \(1, 0\)"),
    "loss that fails": (lambda: hk.hessian(Padded("dict"), KEYWORDS, LABELS, loss=lambda z, t: z.sum() - t.sum()), r"loss\(outputs, target\) with a dict, raised"),
    "loss that is no number": (lambda: hk.hessian(PLAIN, X, T, loss=nn.MSELoss(reduction="none")), r"the loss returned shape \(5, 2\)"),
    "loss that is not finite": (lambda: hk.hessian(PLAIN, X, T, loss=lambda z, t: z.sum() / 0), "the loss is .*inf, not a finite"),
    "target that torch would broadcast": (lambda: hk.hessian(PLAIN, X, T[:1], loss=nn.MSELoss()), "MSELoss needs equal shapes"),
    "several batches": (lambda: hk.check(Padded(), [(KEYWORDS, LABELS)] * 2, **ENTROPY), "check: several batches"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*BAD[case])
