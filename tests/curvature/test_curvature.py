"""The exact Hessian against reverse-over-reverse autograd, in every block, at 1e-12 of the block's largest entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from curvature_reference import (
    Formula,
    assert_exact,
    cross_entropy,
    draw,
    gauss_newton,
    largest_error,
    mse,
    randomised,
    reverse_over_reverse,
)
from operator_cases import LABELS, TOKENS
from readings import BY_PANELS, PANEL, READINGS, assert_readings
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS
from hessiankit.curvature import streaming
from hessiankit.curvature.dense import spectral_norm

MODERN = {"norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": 1, "rotary": True, "causal": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre": {"placement": "pre"},
    "attention biases": {"attention_bias": True, "d_k": 2},
    "heads without W_O": {"n_heads": 2, "output_projection": False, "d_k": 3},
    "no gain": {"affine": False},
    "everything": {"n_heads": 2, "d_k": 3, "bias": True, "attention_bias": True, "causal": True, "placement": "pre"},
    "hybridnorm": {"placement": "hybridnorm", "n_heads": 2, **MODERN},
    "qkvc-pre": {"placement": "qkvc-pre", "n_heads": 2, "bias": True, "attention_bias": True, "d_k": 3, "d_v": 3},
    "admin": {"placement": "admin", "n_heads": 2, "activation": "silu"},
    "group-ln": {"placement": "group-ln", "n_heads": 2, "activation": "gelu", "eps": 0.1},
    "layerscale": {"placement": "layerscale", "n_heads": 2, "activation": "gelu"},
    **{f"activation {name}": {"activation": name, "d_k": 2, "bias": True} for name in ACTIVATIONS},
}


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(4, 5, **options))


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name):
    found = assert_exact(block(**BLOCKS[name]), draw(2, 3, 4))
    assert found.fallbacks == ()
    assert found.asymmetry < 1e-14


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (1, 4), (2, 1, 4), (2, 2, 3, 4)])
def test_shapes_of_the_input(shape):
    assert_exact(block(d_k=2, activation="gelu"), draw(*shape))


CLASSES = torch.tensor([[0, 3, 1], [2, -100, 0], [1, 1, -100]])
LOSSES: dict[str, tuple[Tensor, Any]] = {"mse": (draw(3, 3, 4, seed=7), mse), "cross_entropy": (CLASSES, cross_entropy)}


def gelu_block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(4, 5, **{"d_k": 2, "activation": "gelu", **options}))


def mixed(*rows):
    """A module that mixes these samples of six, and leaves the others apart."""
    first = draw(6, 4)[list(rows), :1]

    def forward(s, x):
        y, both = torch.tanh(x @ s.W), torch.isin(x[:, :1], first)
        return y + both * (y * both).sum(0)

    return forward


MIXING = {
    **{f"samples {i} and {j}": mixed(i, j) for i, j in ((2, 3), (1, 3), (1, 5))},  # apart in one binary digit, each another
    "mean of the batch": lambda s, x: torch.tanh(x @ s.W) - torch.tanh(x @ s.W).mean(0),
    "behind a gate that is closed": lambda s, x: x @ s.W + s.a * torch.tanh(x @ s.W).mean(0),
    "in groups of two": lambda s, x: (x @ s.W) * torch.tanh(x @ s.W).unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "the last two": lambda s, x: torch.cat([torch.tanh(x[:-2] @ s.W), torch.tanh(x[-2:] @ s.W).softmax(0)]),
    "by attention over samples": lambda s, x: torch.softmax(x @ s.W @ x.T, -1) @ x,
}


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_are_mixed_are_kept_together(name, size):
    module, x, target = Formula(MIXING[name], W=(4, 4), a=(1,)), draw(6, 4), draw(6, 4, seed=7)
    module.a.data.zero_()
    found = hk.hessian(module, x, target, batch_size=size)
    assert largest_error(found, reverse_over_reverse(module, x, target, mse)) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_outer_part_is_gauss_newton(loss):
    module, x, (target, function) = gelu_block(), draw(3, 3, 4), LOSSES[loss]
    found = hk.hessian(module, x, target, loss=loss)
    outer, expected = found.outer(), gauss_newton(module, x, target, function)
    assert (outer - expected).abs().max() <= 1e-13 * outer.abs().max()
    assert torch.equal(outer, outer.T)
    assert (outer + found.functional() - found.matrix).abs().max() <= 1e-15 * found.matrix.abs().max()


@pytest.mark.parametrize("options", [{}, {"n_heads": 2, "placement": "pre", "norm": "rmsnorm"}])
def test_symmetric_and_repeatable_to_the_bit(options):
    x, target = draw(3, 3, 4), draw(3, 3, 4, seed=7)
    runs = [hk.hessian(gelu_block(**options), x, target) for _ in range(2)]
    assert torch.equal(runs[0].matrix, runs[0].matrix.T)
    assert torch.equal(runs[0].matrix, runs[1].matrix)
    assert torch.equal(runs[0].outer(), runs[1].outer())
    assert runs[0].loss == runs[1].loss


# The report -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> hk.Hessian:
    return hk.hessian(gelu_block(), draw(3, 3, 4), draw(3, 3, 4, seed=7))


def test_norms_and_eigenvalues(report):
    matrix = report.matrix.numpy()
    assert report.spectral_norm() == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-12)
    assert report.frobenius_norm() == pytest.approx(np.linalg.norm(matrix), rel=1e-14)
    assert np.allclose(report.eigvalsh().numpy(), np.linalg.eigvalsh(matrix), rtol=0, atol=1e-13 * abs(matrix).max())
    for i, j in report.pairs():
        part = report.block(i, j).numpy()
        assert report.spectral_norm(i, j) == pytest.approx(np.linalg.norm(part, 2), rel=1e-10)
        assert report.frobenius_norm(i, j) == pytest.approx(np.linalg.norm(part), rel=1e-14)
    assert report.spectral_norm("norm_1.bias") == report.spectral_norm("norm_1.bias", "norm_1.bias")
    for norm in (report.spectral_norm, report.frobenius_norm):
        with pytest.raises(hk.InputError, match=f"Hessian.{norm.__name__}: name_j='norm_1.bias' without name_i"):
            norm(name_j="norm_1.bias")


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (1, 1), (520, 520)])
def test_spectral_norm(shape):
    a = draw(*shape)
    assert spectral_norm(a) == pytest.approx(np.linalg.norm(a.numpy(), 2), rel=1e-12)
    if shape[0] == shape[1]:
        symmetric = a + a.T - 3 * torch.eye(shape[0], dtype=a.dtype)
        assert spectral_norm(symmetric, symmetric=True) == pytest.approx(np.linalg.norm(symmetric.numpy(), 2), rel=1e-10)
    for c in (1e-200, 1e200):
        assert spectral_norm(c * a) == pytest.approx(c * np.linalg.norm(a.numpy(), 2), rel=1e-12)
    assert spectral_norm(torch.zeros(shape)) == spectral_norm(torch.zeros(0, 3)) == 0.0
    assert spectral_norm(torch.zeros(0, 0), symmetric=True) == 0.0


def test_blocks_slices_and_names(report):
    module = gelu_block()
    assert report.names == tuple(n for n, _ in module.named_parameters())
    assert report.shapes == {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert [report.slices[n].start for n in report.names[1:]] == [report.slices[n].stop for n in report.names[:-1]]
    assert report.block("attention.W_Q", "norm_1.bias").shape == (8, 4)
    assert torch.equal(report.block("norm_1.bias", "attention.W_Q").T, report.block("attention.W_Q", "norm_1.bias"))
    assert len(list(report.pairs())) == 9 * 10 // 2
    with pytest.raises(hk.InputError, match=r"no parameter 'W_Q'; did you mean 'attention\.W_Q'"):
        report.block("W_Q", "attention.W_Q")


def test_the_array_protocol(report):
    matrix, v, V = report.matrix, draw(len(report.matrix)), draw(len(report.matrix), 2)
    assert (report.shape, report.dtype, report.T) == (tuple(matrix.shape), torch.float64, report)
    assert np.array_equal(np.asarray(report), matrix.numpy())
    assert np.asarray(report, dtype=np.float32).dtype == np.float32
    assert not np.shares_memory(np.array(report), matrix.numpy())
    for found, expected in ((report @ v, matrix @ v), (report @ V, matrix @ V), (report @ v.numpy(), (matrix @ v).numpy())):
        assert type(found) is type(expected)
        assert np.allclose(found, expected, rtol=0, atol=1e-13)
    assert np.allclose(v.numpy() @ report, v.numpy() @ matrix.numpy(), rtol=0, atol=1e-13)
    assert torch.equal(report.diagonal(), matrix.diagonal())
    assert report.trace() == pytest.approx(np.trace(matrix.numpy()), rel=1e-14)
    every = np.linalg.eigvalsh(matrix.numpy())
    top = np.sort(every[np.argsort(abs(every))[-4:]])
    assert np.allclose(report.eigvalsh(4).numpy(), top, rtol=0, atol=1e-13 * abs(top).max())


def test_a_lazy_hessian_has_its_shape_and_its_diagonal_without_the_matrix():
    lazy = hk.hessian(gelu_block(), draw(3, 3, 4), draw(3, 3, 4, seed=7), lazy=True)
    expected = hk.hessian(gelu_block(), draw(3, 3, 4), draw(3, 3, 4, seed=7)).matrix.diagonal()
    assert (lazy.shape, lazy.dtype) == ((len(expected), len(expected)), torch.float64)
    assert (lazy.diagonal() - expected).abs().max() <= 1e-13 * expected.abs().max()
    assert "computed when it is read" in repr(lazy)


def test_blocks_by_names_patterns_and_positions(report):
    module, matrix = gelu_block(), report.matrix
    at = {name: range(len(matrix))[where] for name, where in report.slices.items()}
    norms = [k for name in ("norm_1.weight", "norm_1.bias") for k in at[name]]
    assert torch.equal(report["norm_1.bias", "attention.W_Q"], report.block("norm_1.bias", "attention.W_Q"))
    assert torch.equal(report["norm_1.*", "attention.W_Q"], matrix[norms][:, list(at["attention.W_Q"])])
    assert torch.equal(report["norm_1.*"], matrix[norms][:, norms])
    assert torch.equal(report.block(["norm_1.bias", "norm_1.*"], "norm_1.bias"), matrix[norms][:, list(at["norm_1.bias"])])
    columns = list(at["attention.W_Q"])[2:4]
    assert torch.equal(report["norm_1.bias", "attention.W_Q[1]"], matrix[list(at["norm_1.bias"])][:, columns])
    assert torch.equal(report["*norm_1.weight[:2]"], matrix[norms[:2]][:, norms[:2]])
    bias = list(at["norm_1.bias"])
    assert torch.equal(report[["norm_1.bias[1:3]", "norm_1.bias[:2]"]], matrix[bias[:3]][:, bias[:3]])  # each entry once
    assert torch.equal(report[["norm_1.bias[0]", "norm_1.bias"]], matrix[bias][:, bias])
    assert (report[3, 5], report[3].shape, report[:2, -3:].shape) == (matrix[3, 5], (len(matrix),), (2, 3))
    lazy = hk.hessian(module, draw(3, 3, 4), draw(3, 3, 4, seed=7), lazy=True)
    assert (lazy["norm_1.*"] - report["norm_1.*"]).abs().max() <= 1e-13 * report["norm_1.*"].abs().max()
    assert "computed when it is read" in repr(lazy)


REFUSED = {
    "another length": (lambda H: H @ torch.zeros(3).double(), r"cannot multiply with shape \(3,\); expected a vector"),
    "another dtype": (lambda H: H @ torch.zeros(len(H.matrix)), "the vectors are torch.float32; expected torch.float64"),
    "no vector": (lambda H: H @ 2.0, "cannot multiply with a float; expected a torch tensor or a NumPy array"),
    "an unknown name": (lambda H: H["W_Q"], "no parameter 'W_Q'; did you mean 'attention.W_Q'"),
    "a name beside a position": (lambda H: H["norm_1.bias", 0], "a parameter is asked for by its name, not by a value 0"),
    "an empty list": (lambda H: H.block([], "norm_1.bias"), "Hessian.block: an empty list selects no parameter"),
    "no eigenvalue": (lambda H: H.eigvalsh(0), "eigvalsh: k=0 asks for no eigenvalue; pass 1 or more, or None for all"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_hessian_cannot_be_asked_for(report, case):
    call, message = REFUSED[case]
    with pytest.raises(hk.InputError, match=message):
        call(report)


def test_dictionary_is_plain_data(report):
    read = json.loads(json.dumps(report.to_dict()))
    assert (read["parameters"], read["dtype"], read["fallbacks"]) == (report.matrix.shape[0], "torch.float64", [])
    assert read["shapes"]["attention.W_Q"] == [4, 2]
    assert len(read["blocks"]) == 45
    first = read["blocks"][0]
    assert (first["row"], first["column"]) == ("attention.W_Q", "attention.W_Q")
    assert first["spectral_norm"] == report.spectral_norm("attention.W_Q")


def test_what_it_prints(report):
    for text in (report.table(), report._repr_html_()):
        assert f"{report.matrix.shape[0]} x {report.matrix.shape[0]}" in text
        assert all(name in text for name in report.names)
        assert f"{report.frobenius_norm('norm_2.bias'):.4g}" in text
        assert "differentiated automatically" not in text
    fallback = hk.hessian(Formula(lambda s, x: torch.sinc(x @ s.W), W=(4, 2)), draw(3, 4), draw(3, 2))
    for text in (fallback.table(), fallback._repr_html_()):
        assert "aten.sinc.default" in text


INPUTS, TARGET = draw(5, 3, 4), draw(5, 3, 4, seed=7)
SHORT = (INPUTS[:2, :2], TARGET[:2, :2])


class Request(NamedTuple):
    """A module, its data as they are given, and the weighted sum of losses that they stand for: (weight, inputs, target)."""

    module: nn.Module
    data: tuple[Any, ...]
    terms: list[tuple[float, Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = mse
    options: dict[str, Any] = {}  # noqa: RUF012


def network() -> nn.Module:
    """Tokens that parameters move meet in the attention."""
    return randomised(nn.Sequential(nn.Linear(4, 4), hk.TransformerBlock(4, 3, d_k=2)))


def perceptron() -> Formula:
    return Formula(lambda s, x: torch.tanh(x @ s.A + s.b) @ s.C, A=(4, 3), b=(3,), C=(3, 4))


def labelled() -> Request:
    batches = [(TOKENS[:1, :3], LABELS[:1, :3]), (TOKENS[1:], LABELS[1:])]
    terms = [(2 / 6, *batches[0]), (4 / 6, *batches[1])]
    module = Formula(lambda s, ids: torch.tanh(s.E[ids] @ s.W) @ s.E.T, E=(7, 4), W=(4, 4))
    return Request(module, (batches,), terms, cross_entropy, {"loss": "cross_entropy"})


def reached_by_one_batch() -> Request:
    module = Formula(lambda s, x: torch.tanh(x @ (s.A if len(x) == 3 else s.B)), A=(4, 2), B=(4, 2))
    batches = [(INPUTS[:3], TARGET[:3, :, :2]), (INPUTS[3:], TARGET[3:, :, :2])]
    return Request(module, (batches,), [(0.8, *batches[0]), (0.2, *batches[1])], mse, {"params": ["A"], "weights": [4, 1]})


def partly_used() -> Formula:
    return Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 2), unused=(3,))


REQUESTS: dict[str, Callable[[], Request]] = {
    "batches of unequal lengths and weights": lambda: Request(
        network(), ([(INPUTS, TARGET), SHORT],), [(0.25, INPUTS, TARGET), (0.75, *SHORT)], options={"weights": [1, 3]}
    ),
    "sum over batches": lambda: Request(
        perceptron(), ([(INPUTS, TARGET), SHORT],), [(60.0, INPUTS, TARGET), (16.0, *SHORT)], options={"reduction": "sum"}
    ),
    "labels that are ignored": labelled,
    "a batch without effect": reached_by_one_batch,
    "a parameter without effect": lambda: Request(partly_used(), (INPUTS, TARGET[..., :2]), [(1.0, INPUTS, TARGET[..., :2])]),
    "some parameters": lambda: Request(
        network(), (INPUTS, TARGET), [(1.0, INPUTS, TARGET)], options={"params": ["1.attention.W_V", "1.feedforward.W_1"]}
    ),
    "a loss of one's own": lambda: Request(
        perceptron(), (INPUTS, TARGET), [(1.0, INPUTS, TARGET)], nn.functional.huber_loss, {"loss": nn.functional.huber_loss}
    ),
}


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_reading_is_that_of_one_matrix(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PANEL", PANEL)
    module, data, terms, loss, options = REQUESTS[name]()
    derivative = reverse_over_reverse if kind == "hessian" else gauss_newton
    expected = sum(weight * derivative(module, x, t, loss, options.get("params")) for weight, x, t in terms)
    value = sum(weight * float(loss(module(x).detach(), t)) for weight, x, t in terms)
    readings = READINGS | BY_PANELS if kind == "hessian" else READINGS
    given = options if kind == "hessian" else {**options, "kind": kind}
    for found in assert_readings(expected, module, *data, readings=readings, **given).values():
        assert found.loss == pytest.approx(value, rel=1e-13)
        assert found.fallbacks == ()


def test_a_module_that_returns_its_loss() -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.W).square().sum(), W=(4, 5))
    assert_readings(reverse_over_reverse(module, INPUTS, None, None), module, INPUTS, readings=READINGS | BY_PANELS, loss=None)


@pytest.mark.parametrize("name", [*READINGS, *BY_PANELS])
def test_what_has_no_matrix_is_refused_by_name(name: str) -> None:
    call = (READINGS | BY_PANELS)[name].call
    with pytest.raises(hk.InputError, match=r"none of the parameters \('unused'\) has an effect"):
        call(partly_used(), INPUTS, TARGET[..., :2], params="unused")
    root = Formula(lambda s, x: torch.sqrt(x @ s.W), W=(4, 2), b=(3,))
    place = "products with the Hessian are" if name == "hessian_operator" else r"the block \('W', 'W'\) is"
    with pytest.raises(
        hk.TraceError, match="the module's own gradient with respect to 'W' is NaN or infinite where that of the trace is not"
    ):
        call(root, 0 * INPUTS, TARGET[..., :2])  # no entry moves: the Hessian is zero, and torch multiplies zero by infinity
    root.W.data.zero_()
    with pytest.raises(hk.InputError, match=f"{place} NaN or infinite"):
        call(root, INPUTS, TARGET[..., :2])
    with pytest.raises(hk.InputError, match="the derivative for '_unique2' is not implemented"):
        call(Formula(lambda s, x: (x @ s.W).unique(), W=(4, 2)), INPUTS, torch.zeros(()), loss=lambda z, t: z.square().sum())
