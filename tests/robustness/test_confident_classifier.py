"""Cross entropy where p(label) is almost 1, as near a minimum: p - 1 and p (1 - p) keep their digits, against 60 digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from many_digits import ManyDigits
from torch import Tensor, nn

import hessiankit as hk
from derivations.activation_functions import derivatives
from derivations.loss import CrossEntropyAt
from hessiankit.primitives.elementwise import KINDS
from hessiankit.primitives.loss import CrossEntropy
from hessiankit.primitives.softmax import LogSoftmax

GAPS = [2.0, 17.0, 45.0, 200.0]
"""Of the label's logit over the next one: 1 - p is from 0.1 to 1e-87."""


def softmax(logits: list[float]) -> tuple[Any, Any]:
    """p and diag(p) - p p^T in 400 digits."""
    with mp.workdps(400):
        powers = [mp.exp(mp.mpf(v)) for v in logits]
        p = [e / sum(powers) for e in powers]
        K = [[a * ((i == j) - b) for j, b in enumerate(p)] for i, a in enumerate(p)]
        slope = [a - (i == 0) for i, a in enumerate(p)]
    return np.array(slope, dtype=float), np.array(K, dtype=float)


def assert_every_digit(found: Tensor, expected: Any) -> None:
    """To 1e-12 of each entry, not of the largest."""
    expected = torch.tensor(expected) if isinstance(expected, np.ndarray) else expected
    assert bool(((found - expected).abs() <= 1e-12 * expected.abs()).all()), (found, expected)


@pytest.mark.parametrize("gap", GAPS)
def test_slope_and_curvature_in_the_logits(gap):
    logits = torch.tensor([[gap, 0.0, -1.0, 0.5]], dtype=torch.float64) + 3
    label, one, eye = torch.tensor([0]), torch.ones((), dtype=torch.float64), torch.eye(4, dtype=torch.float64).unsqueeze(1)
    slope, K = softmax(logits[0].tolist())
    primitive = CrossEntropy()
    assert_every_digit(primitive.vjp((logits, label), one.reshape(1))[0][0, 0], slope)
    assert_every_digit(primitive.curvature((logits, label), one, (eye, None))[0][:, 0], K)
    chapter = CrossEntropyAt(logits, label)
    assert_every_digit(chapter.jacobian("logits").dense()[0], slope)
    assert_every_digit(chapter.hessian("logits", "logits").dense(), K)


@pytest.mark.parametrize("gap", GAPS)
def test_log_softmax_pulls_back_what_soft_labels_give(gap):
    """g - p (1 . g) at every entry, the label's among them; with g for the others from large to negligible beside 1 - p."""
    logits = [gap, 0.0, -1.0, 0.5]
    for other in (0.3, 1e-3, 1e-15):
        g = torch.tensor([[-1.0, -other, other / 2, -other / 4]], dtype=torch.float64)
        with mp.workdps(400):
            powers = [mp.exp(mp.mpf(v)) for v in logits]
            exact = [mp.mpf(float(v)) for v in g[0]]
            expected = [float(a - e / sum(powers) * sum(exact)) for a, e in zip(exact, powers, strict=True)]
        found = LogSoftmax(-1).vjp((torch.tensor([logits], dtype=torch.float64),), g)[0]
        assert_every_digit(found[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "size"), [("three gaps", 12.0), ("one confident row", 6.0), ("a row without a label", 30.0)])
def test_the_diagonal_of_several_confident_rows(kind, size):
    """A mean over rows: each has its share of the loss, and its own distance from one-hot."""
    generator = torch.Generator().manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        module[2].weight.mul_(size)
        x = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        y = module(x).argmax(-1)
    p = torch.softmax(module(x).detach(), -1).amax(-1)
    assert float(p.max()) > 0.9999
    kept = torch.tensor([0, 2]) if kind == "a row without a label" else torch.arange(3)
    judge = ManyDigits(module, x[kept], y[kept], "cross_entropy")
    expected = torch.stack([judge.column(k)[k] for k in range(sum(p.numel() for p in module.parameters()))])
    y[[k for k in range(3) if k not in kept]] = -100
    found = hk.hessian_diagonal(module, x, y, loss="cross_entropy")
    entries = torch.cat([found[name].reshape(-1) for name, _ in module.named_parameters()])
    assert float((entries - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor] | str] = {
    "the named loss": "cross_entropy",
    "log_softmax, written out": lambda z, t: -F.log_softmax(z, -1).gather(1, t.unsqueeze(1)).mean(),
    "with class weights": lambda z, t: F.cross_entropy(z, t, weight=torch.ones(4, dtype=z.dtype)),
}


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_confident_classifier_has_an_exact_hessian_and_an_operator(name, gap):
    """Its operator was refused for an asymmetry that rounding had made."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
        z = module(x)[0]
        label = z.argmax()
        module[2].weight.mul_(gap / (z[label] - z.topk(2).values[1]))
    loss, target = LOSSES[name], label.reshape(1)
    found = hk.hessian(module, x, target, loss=loss).matrix
    judge = ManyDigits(module, x, target, "cross_entropy")
    for k in (0, 14, 25):
        assert float((found[:, k] - judge.column(k)).abs().max()) <= 1e-12 * float(found.abs().max())
    operator = hk.hessian_operator(module, x, target, loss=loss)
    assert operator.symmetry_error <= 1e-12
    assert float((operator.to_matrix() - found).abs().max()) <= 1e-12 * float(found.abs().max())


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": mp.tanh,
    "gelu": lambda v: v * mp.erfc(-v / mp.sqrt(2)) / 2,
    "gelu_tanh": lambda v: v / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (v + mp.mpf("0.044715") * v**3))),
    "sigmoid": lambda v: 1 / (1 + mp.exp(-v)),
    "mish": lambda v: v * mp.tanh(mp.log(1 + mp.exp(v))),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_derivatives_of_a_saturated_function_keep_their_digits(kind):
    """In the tails too, where they are 1e-200 and 1 - tanh^2 or a normal law's table is 0; to 1e-12 of each entry."""
    points = [-25.0, -12.0, -8.0, -5.0, -2.0, -0.3, 1e-9, 0.2, 3.0, 7.0, 12.0, 19.0]
    x = torch.tensor(points, dtype=torch.float64)
    _, first, second = KINDS[kind](x) if kind in KINDS else derivatives(kind, x)
    with mp.workdps(250):
        for order, found in ((1, first), (2, second)):
            expected = [float(mp.diff(FUNCTIONS[kind], mp.mpf(v), order, h=mp.mpf("1e-40"))) for v in points]
            assert_every_digit(found, torch.tensor(expected, dtype=torch.float64))
