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
from curvature_reference import Formula, assert_one_clear_error, draw, randomised
from loss_reference import Padded, by_autograd, sequences, token_loss
from operator_cases import EXACT, error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hessiankit as hk

IDS, MASK, LABELS = sequences()
KEYWORDS = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("inputs", "returns"),
    [
        (KEYWORDS, "dict"),
        (UserDict(KEYWORDS), "object"),
        ({"attention_mask": MASK, "input_ids": IDS}, "tensor"),
        ((IDS, MASK), "object"),
        ([IDS, MASK], "tensor"),
    ],
)
def test_padded_tokens(inputs: Any, returns: str) -> None:
    module = Padded(returns)
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK), LABELS))
    assert error(hk.hessian(module, inputs, LABELS, loss="cross_entropy").matrix, expected) <= EXACT
    assert error(hk.hessian_operator(module, inputs, LABELS, loss="cross_entropy").to_matrix(), expected) <= EXACT


@pytest.mark.parametrize("batch_size", [1, 3])
def test_samples_are_cut_in_every_tensor(batch_size: int) -> None:
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK), LABELS))
    seen: list[tuple[int, int]] = []
    found = hk.hessian(
        Padded(), KEYWORDS, LABELS, loss="cross_entropy", batch_size=batch_size, progress=lambda *at: seen.append(at)
    )
    assert error(found.matrix, expected) <= EXACT
    assert seen == ([(1, 4), (2, 4), (3, 4), (4, 4)] if batch_size == 1 else [(3, 4), (4, 4)])


@pytest.mark.parametrize("returns", ["dict", "object", "loss"])
def test_module_that_returns_its_loss(returns: str) -> None:
    inputs = {**KEYWORDS, "labels": LABELS}
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK)[:, :-1], LABELS[:, 1:]))
    found = hk.hessian(Padded(returns), inputs, loss=None)
    assert error(found.matrix, expected) <= EXACT
    assert error(hk.hessian_operator(Padded(returns), inputs, loss=None).to_matrix(), expected) <= EXACT
    assert found.loss == pytest.approx(float(Padded("loss")(**inputs).detach()), rel=1e-14)
    if returns == "loss":
        with pytest.raises(hk.InputError, match=r"kind='ggn' needs the module's output .* pass loss="):
            found.outer()
        return
    expected = by_gauss_newton(Padded(), lambda z: token_loss(z[:, :-1], LABELS[:, 1:]))
    assert error(found.outer(), expected) <= EXACT
    assert error(hk.hessian_operator(Padded(returns), inputs, loss=None, kind="ggn").to_matrix(), expected) <= EXACT
    report = hk.approximations(Padded(returns), inputs, loss=None, against="ggn", of=["diagonal"])
    assert report.frobenius == pytest.approx(float(expected.norm()), rel=1e-10)


@pytest.mark.parametrize("returns", ["dict", "object"])
def test_callable_is_given_what_the_module_returns(returns: str) -> None:
    def own(outputs: Any, target: dict[str, Tensor]) -> Tensor:
        logits = outputs["logits"] if returns == "dict" else outputs.logits
        return token_loss(logits, target["labels"]) + (logits * target["weight"]).square().mean()

    weight = draw(5)
    target = {"labels": LABELS, "weight": weight}
    expected = by_autograd(Padded(), lambda m: token_loss(z := m(IDS, MASK), LABELS) + (z * weight).square().mean())
    found = hk.hessian(Padded(returns), KEYWORDS, target, loss=own)
    assert error(found.matrix, expected) <= EXACT
    assert error(hk.hessian_operator(Padded(returns), KEYWORDS, target, loss=own).to_matrix(), expected) <= EXACT
    gauss_newton = by_gauss_newton(Padded(), lambda z: token_loss(z, LABELS) + (z * weight).square().mean())
    assert error(found.outer(), gauss_newton) <= EXACT
    ggn = hk.hessian_operator(Padded(returns), KEYWORDS, target, loss=own, kind="ggn")
    assert error(ggn.to_matrix(), gauss_newton) <= EXACT
    diagonal = hk.hessian_diagonal(Padded(returns), KEYWORDS, target, loss=own, kind="ggn")
    assert error(diagonal.flat, gauss_newton.diagonal()) <= EXACT


def by_gauss_newton(module: nn.Module, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """J^T L'' J by torch.autograd.functional, of a module called on the padded tokens."""
    names = [name for name, _ in module.named_parameters()]

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (IDS, MASK))

    values = tuple(p.detach() for p in module.parameters())
    z = output(*values)
    J = torch.cat([j.reshape(z.numel(), -1) for j in torch.autograd.functional.jacobian(output, values, vectorize=True)], 1)
    return J.T @ torch.autograd.functional.hessian(loss, z).reshape(z.numel(), -1) @ J


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
    "a function": F.cross_entropy,
}


class Returned(nn.Module):
    """logits = tanh(x W^T + b) V^T + c, in whatever ``kind`` makes of them and of the loss, if there are labels."""

    def __init__(self, kind: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 2), kind
        randomised(self)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        z = self.last(torch.tanh(self.first(x)))
        return self.kind(z, None if labels is None else F.cross_entropy(z, labels))


KINDS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "object": lambda z, value: SimpleNamespace(logits=z, loss=value),
    "dict": lambda z, value: {"logits": z, "loss": value},
    "logits first": lambda z, value: (z, value),
    "loss first": lambda z, value: (value, z),
}
CLASSES = torch.tensor([0, 1, 1, 0, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TORCHS)
def test_losses_of_torch_read_the_logits(name: str, kind: str) -> None:
    x, loss = draw(5, 3), TORCHS[name]
    expected = by_autograd(Returned(lambda z, _: z), lambda m: loss(m(x), CLASSES))
    module = Returned(KINDS[kind])
    assert error(hk.hessian(module, x, CLASSES, loss=loss).matrix, expected) <= EXACT
    assert error(hk.hessian_operator(module, x, CLASSES, loss=loss).to_matrix(), expected) <= EXACT
    plain = hk.hessian(Returned(lambda z, _: z), x, CLASSES, loss=loss).outer()
    assert error(hk.hessian_operator(module, x, CLASSES, loss=loss, kind="ggn").to_matrix(), plain) <= EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_what_the_module_returns(kind: str) -> None:
    x, module = draw(5, 3), Returned(KINDS[kind])
    expected = by_autograd(Returned(lambda z, _: z), lambda m: F.cross_entropy(m(x), CLASSES))
    assert error(hk.hessian(module, (x, CLASSES), loss=None).matrix, expected) <= EXACT
    assert error(hk.hessian(module, x, CLASSES, loss="cross_entropy").matrix, expected) <= EXACT
    batches = [(x[:2], CLASSES[:2]), (x[2:], CLASSES[2:])]
    assert error(hk.hessian(module, batches, loss=None, weights=[2, 3]).matrix, expected) <= EXACT


def test_a_tuple_of_several_tensors_is_refused() -> None:
    module = Returned(lambda z, _: (z, 2 * z))
    with pytest.raises(hk.InputError, match=r"returned tuple \(of Tensor, Tensor\), .* or a tuple with one tensor"):
        hk.hessian(module, draw(5, 3), CLASSES, loss="cross_entropy")
    with pytest.raises(hk.InputError, match=r"returned tuple \(of Tensor, Tensor\), .* or a tuple with one number"):
        hk.hessian(module, draw(5, 3), loss=None)


class Product(nn.Module):
    """W (a * b), of two arguments or of a list."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.forward = self.of_a_list if listed else self.of_two  # type: ignore[method-assign]
        randomised(self)

    def of_two(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a * b)  # type: ignore[no-any-return]

    def of_a_list(self, pair: list[Tensor]) -> Tensor:
        return self.of_two(*pair)


@pytest.mark.parametrize("listed", [False, True])
def test_a_loader_of_lists_of_inputs(listed: bool) -> None:
    a, b, module = draw(5, 3), draw(5, 3, seed=2), Product(listed=listed)
    expected = by_autograd(module, lambda m: F.cross_entropy(m.of_two(a, b), CLASSES))
    samples = [((a[k], b[k]), CLASSES[k]) for k in range(5)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    assert error(hk.hessian(module, loader, loss="cross_entropy").matrix, expected) <= EXACT
    assert error(hk.hessian_operator(module, loader, loss="cross_entropy").to_matrix(), expected) <= EXACT
    assert error(hk.hessian(module, [a, b], CLASSES, loss="cross_entropy", batch_size=1).matrix, expected) <= EXACT
    assert listed or hk.check(module, [a, b], CLASSES, loss="cross_entropy")


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
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = by_autograd(module, lambda m: (m(x, mask) - t).square().mean())
    assert error(hk.hessian(module, {"src": x, "src_mask": mask}, t).matrix, expected) <= EXACT
    assert error(hk.hessian(module, (x, mask), t).matrix, expected) <= EXACT

    own = Formula(lambda m, x: torch.softmax(m.lin(x) @ x.mT + m.mask, -1) @ x, lin=nn.Linear(4, 4))
    own.register_buffer("mask", mask)
    assert hk.hessian(own, x, t).matrix.isfinite().all()
    with pytest.raises(hk.InputError, match=r"inputs contains NaN or infinity, first at index \(0, 1, 2\)"):
        hk.hessian(own, x.index_put((torch.tensor(0), torch.tensor(1), torch.tensor(2)), torch.tensor(-torch.inf).double()), t)


def test_check_takes_keywords_and_output_objects() -> None:
    report = hk.check(Padded("object"), UserDict(KEYWORDS), LABELS, loss="cross_entropy", params="*.weight")
    assert report, report
    assert {"reverse-over-reverse", "jvp(grad)", "central-differences"} <= set(report.references)
    assert report.hessian.names == ("embedding.weight", "query.weight", "key.weight", "head.weight")
    assert hk.check(Padded("dict"), {**KEYWORDS, "labels": LABELS}, loss=None, params=["query.weight"])
    with pytest.raises(hk.InputError, match="check: several batches"):
        hk.check(Padded(), [(KEYWORDS, LABELS)] * 2, loss="cross_entropy")


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 3).double(), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.layer(x))


X, T = draw(2, 4), draw(2, 3, seed=2)


class Refuses(nn.Module):
    """W x, after an exception for more than one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise KeyError("one at a time")
        return self.layer(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """V tanh(W x + b) + c, with the first layer in a checkpoint that gets the parameters, or finds them itself."""

    def __init__(self, *, given: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.given, self.use_reentrant = nn.Linear(4, 2), nn.Linear(2, 3), given, use_reentrant
        randomised(self)

    def forward(self, x: Tensor) -> Tensor:
        inputs = tuple(self.first.parameters()) if self.given else (x.clone().requires_grad_(),)
        run = (lambda W, b: torch.tanh(F.linear(x, W, b))) if self.given else lambda x: torch.tanh(self.first(x))
        return self.last(checkpoint(run, *inputs, use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("handshake", [False, True])
def test_reentrant_checkpoints_are_refused_with_what_helps(given: bool, handshake: bool) -> None:
    with pytest.raises(hk.InputError, match=r"a reentrant checkpoint hides .*; pass use_reentrant=False"):
        hk.hessian(Checkpointed(given=given, use_reentrant=True), X, T, handshake=handshake)
    module = Checkpointed(given=given, use_reentrant=False)
    expected = by_autograd(module, lambda m: F.mse_loss(m.last(torch.tanh(m.first(X))), T))
    assert error(hk.hessian(module, X, T, handshake=handshake).matrix, expected) <= EXACT


def test_what_is_advised_for_complex_parameters_helps() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imaginary = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))
            randomised(self)

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ torch.complex(self.real, self.imaginary).T).abs()

    expected = by_autograd(Joined(), lambda m: F.mse_loss(((X @ m.real.T).square() + (X @ m.imaginary.T).square()).sqrt(), T))
    assert error(hk.hessian(Joined(), X, T).matrix, expected) <= EXACT


JAGGED = torch.nested.nested_tensor([draw(2, 4), draw(3, 4)], layout=torch.jagged)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "an exception with integer inputs": (lambda: hk.hessian(Refuses(), X.long(), T), r"raised KeyError: 'one at a time' \(at .*in forward: raise KeyError\(.one at a time.\)\)$"),
    "integer inputs": (lambda: hk.hessian(nn.Linear(4, 3).double(), X.long(), T), r"raised RuntimeError: .*dtype.*; inputs are torch.int64 but the module has no embedding to look them up in, pass torch.float64"),
    "complex parameters": (lambda: hk.hessian(nn.Linear(4, 3, dtype=torch.complex128), X, T), "expected real ones, such as the real and imaginary parts"),
    "jagged inputs": (lambda: hk.hessian(nn.Linear(4, 3).double(), JAGGED, T), r"inputs is a nested tensor .* e.g. torch.nested.to_padded_tensor\(inputs, 0.0\)"),
    "jagged target": (lambda: hk.hessian(nn.Linear(4, 3).double(), X, JAGGED), r"target is a nested tensor .*to_padded_tensor\(target, 0.0\)"),
    "a tuple": (lambda: hk.hessian(Returns(lambda z: (z, z, 1)), X, T), r"returned tuple \(of Tensor, Tensor, int\), expected one tensor"),
    "a dict without logits": (lambda: hk.hessian(Returns(lambda z: {"out": z}), X, T), r"dict \(with 'out'\), .* dict with 'logits'"),
    "logits that are None": (lambda: hk.hessian(Returns(lambda z: {"logits": None}), X, T), "dict whose 'logits' is None"),
    "nothing": (lambda: hk.hessian(Returns(lambda z: None), X, T), "returned NoneType, expected"),
    "no labels": (lambda: hk.hessian(Padded("object"), KEYWORDS, loss=None), "whose 'loss' is None, .* pass the labels"),
    "no target": (lambda: hk.hessian(Padded(), KEYWORDS, loss="cross_entropy"), "loss='cross_entropy' needs a target"),
    "target without use": (lambda: hk.hessian(Padded("loss"), {**KEYWORDS, "labels": LABELS}, LABELS, loss=None), "would not be used"),
    "unknown keyword": (lambda: hk.hessian(Padded(), {"ids": IDS}, LABELS, loss="cross_entropy"), r"inputs\['ids'\] \(4, 5\), raised TypeError: .*unexpected keyword"),
    "key that is no string": (lambda: hk.hessian(Padded(), {0: IDS}, LABELS, loss="cross_entropy"), "has the key 0"),
    "dtype of one key": (lambda: hk.hessian(Padded(), {**KEYWORDS, "attention_mask": MASK.float()}, LABELS, loss="cross_entropy"), r"inputs\['attention_mask'\] is torch.float32"),
    "no entries in one key": (lambda: hk.hessian(Padded(), {**KEYWORDS, "attention_mask": MASK[:0]}, LABELS, loss="cross_entropy"), r"inputs\['attention_mask'\] has shape \(0, 5\)"),
    "target that is no tensor": (lambda: hk.hessian(Padded(), KEYWORDS, LABELS.tolist(), loss="cross_entropy"), "target is a list"),
    "loss that fails": (lambda: hk.hessian(Padded("dict"), KEYWORDS, LABELS, loss=lambda z, t: z.sum() - t.sum()), r"loss\(outputs, target\) with a dict, raised"),
    "loss that is no number": (lambda: hk.hessian(Returns(lambda z: z), X, T, loss=nn.MSELoss(reduction="none")), r"the loss returned shape \(2, 3\)"),
    "loss that is not finite": (lambda: hk.hessian(Returns(lambda z: z), X, T, loss=lambda z, t: z.sum() / 0), "the loss is .*inf, not a finite"),
    "loss of a strange type": (lambda: hk.hessian(Returns(lambda z: z), X, T, loss=3), "loss is a int"),  # type: ignore[arg-type]
    "target that torch would broadcast": (lambda: hk.hessian(Returns(lambda z: z), X, T[:1], loss=nn.MSELoss()), "MSELoss needs equal shapes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*BAD[case])
