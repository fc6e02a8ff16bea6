"""Numbers that a module or a loss reads out of tensors or draws from a seed: constants to autograd; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, cross_entropy, draw, mse, reverse_over_reverse
from operator_cases import EXACT, error
from readings import READINGS, assert_readings, in_turn
from torch import Tensor

import hessiankit as hk

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, of the user's own line

LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0])

KEPT: list[Any] = []


def kept(function: Callable[[Tensor], Any]) -> Callable[[Tensor], float]:
    def number(h: Tensor) -> float:
        KEPT.append(function(h))
        return 1.0

    return number


READS: dict[str, Callable[[Tensor], Any]] = {
    "kept: tolist": kept(lambda h: h.tolist()),
    "kept: text": kept(lambda h: f"{h.sum():.3f} {h}"),
    "kept: array": kept(lambda h: h.detach().cpu().numpy()),
    "item": lambda h: h.square().sum().item(),
    "int": lambda h: int(10 * h.square().sum()),
    "complex": lambda h: abs(complex(h.sum())),
    "list": lambda h: max(h.reshape(-1).tolist()),
    "array": lambda h: float(np.asarray(h.detach()).std()),
    "array on the memory": lambda h: torch.from_numpy(h.detach().numpy()).exp().mean(),
    "tensor of it": lambda h: torch.tensor([h.square().sum(), 2.0], dtype=h.dtype).sum(),
    "text": lambda h: float(f"{h.square().sum():.4f}"),
    "without gradients": torch.no_grad()(lambda h: h.square().mean().item()),
    "branch": lambda h: h.square().mean() if h.square().mean().item() > 0.01 else 1.0,
    "branch of a truth value": lambda h: h.sin().mean() if (h > 0).any() and not torch.allclose(h, 0 * h) else 1.0,
    "loop": lambda h: sum((h[k].square().sum() for k in range(1 + int(h.abs().sum()) % 3)), h.new_zeros(())),
    "index": lambda h: h[int(h.detach().sum(-1).argmax())].square().sum(),
}


def close(found: Tensor, expected: Tensor) -> bool:
    return error(found, expected) <= EXACT


@pytest.mark.parametrize(("k", "name"), enumerate(READS))
def test_a_number_is_a_constant(k, name):
    """Of the forward, or of the loss, in turn."""
    of_forward, of_loss = (READS[name] if here else (lambda _: 1.0) for here in (k % 2, not k % 2))

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.W)
        return h * of_forward(h) @ s.V

    def loss(z: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(z, labels) * of_loss(z)

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    expected = reverse_over_reverse(module, x, LABELS, loss)
    assert_readings(expected, module, x, LABELS, loss=loss, readings=in_turn(k // 2))


COUPLED: dict[str, Callable[[Tensor], Any]] = {
    "a mean without gradients": lambda h: h.detach().square().mean().item(),
    "the sign of a mean": lambda h: 2.0 if h.mean() > 0 else 0.5,
    "any": lambda h: 2.0 if (h.square().sum(-1) > 0.9 * h.square().sum(-1).max()).sum() < len(h) else 0.5,
    "a count": lambda h: float((h > 0).sum()),
}


@pytest.mark.parametrize(("k", "name"), enumerate(COUPLED))
@pytest.mark.parametrize("handshake", [True, False])
def test_samples_that_a_number_couples_are_not_treated_apart(k, name, handshake):
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.W)
        return h * COUPLED[name](h) @ s.V

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    expected = reverse_over_reverse(module, x, LABELS, cross_entropy)
    options = {"loss": "cross_entropy", "handshake": handshake}
    whole = {name: READINGS[name] for name in ("hessian", "hessian_diagonal")}
    assert_readings(expected, module, x, LABELS, readings=whole, batch_size=1, **options)
    with pytest.raises(hk.TraceError, match=r"samples depend on each other, .* a number that is read from all of them"):
        hk.hessian_operator(module, x, LABELS, micro_batch=1, **options)


def test_a_branch_that_halves_of_the_batch_share():
    x = draw(8, 3)
    x[0] = -3.0  # alone below the mean of every half of the batch

    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ s.W) @ s.V if x.mean() > -2.0 else torch.sin(x @ s.W) @ s.V

    module, labels = Formula(forward, W=(3, 4), V=(4, 2)), LABELS[torch.arange(8) % 7]
    expected = reverse_over_reverse(module, x, labels, cross_entropy)
    assert close(hk.hessian(module, x, labels, loss="cross_entropy", batch_size=1, handshake=False).matrix, expected)


def test_samples_with_the_same_numbers_are_treated_apart():
    KEPT.clear()  # not in a closure, which is put back

    def forward(s: Any, x: Tensor) -> Tensor:
        KEPT.append(len(x))
        h = torch.tanh(x @ s.W)
        assert torch.isfinite(h).all()
        return h @ s.V

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    operator = hk.hessian_operator(module, x, LABELS, loss="cross_entropy", micro_batch=2)
    assert close(operator.to_matrix(), reverse_over_reverse(module, x, LABELS, cross_entropy))
    assert close(hk.hessian(module, x, LABELS, loss="cross_entropy", batch_size=2).matrix, operator.to_matrix())
    assert 2 in KEPT


@pytest.mark.parametrize("handshake", [True, False])
def test_numbers_that_rounding_decides_are_refused(handshake):
    """Torch's batch norm and its closed form round apart, so that a count of equal entries differs between a call and its trace."""
    x, module = draw(7, 3), Formula(lambda s, x: x @ s.W, W=(3, 4), V=(4, 2))
    exactly = torch.nn.functional.batch_norm(module(x).detach(), None, None, training=True)

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.nn.functional.batch_norm(x @ s.W, None, None, training=True)
        return h * (1.0 + int((h.detach() == exactly).sum())) @ s.V

    module.f = forward
    with pytest.raises(
        hk.TraceError, match=r"own call has 28 where its trace has [0-9]+, at .*test_numbers.py:[0-9]+ in forward: return h"
    ):
        hk.hessian(module, x, LABELS, loss="cross_entropy", handshake=handshake)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def written_in_place(s: Formula, x: Tensor) -> Tensor:
    noise, generator = torch.empty(3, 4, dtype=x.dtype), seeded()
    first = noise[0]
    noise[1:].normal_(generator=generator)
    first.uniform_(1, 2, generator=generator)
    return (x @ s.W).exp() * noise.exponential_(generator=generator) * first


def with_the_global_seed(f: Callable[[Formula, Tensor], Tensor]) -> Callable[[Formula, Tensor], Tensor]:
    def forked(s: Formula, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return f(s, x)

    return forked


DRAWN: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "normal": lambda s, x: (x @ s.W).exp() * torch.randn(3, 4, generator=seeded(), dtype=x.dtype),
    "in place": written_in_place,
    "integers": lambda s, x: (x @ s.W).exp()[torch.randperm(3, generator=seeded())] * torch.randint(5, (4,), generator=seeded()),
    "of moving probabilities": lambda s, x: (
        (p := (x @ s.W).sigmoid()) * torch.bernoulli(p, generator=seeded()) + torch.multinomial(p, 1, generator=seeded()) * p
    ),
    "of the shape of a moving value": with_the_global_seed(lambda s, x: (z := (x @ s.W).tanh()) * torch.randn_like(z) + z**2),
    "dropout": with_the_global_seed(lambda s, x: F.dropout((x @ s.W).exp(), 0.3, training=True)),
    "leaky by chance": with_the_global_seed(lambda s, x: F.rrelu(x @ s.W, training=True).sin()),
    "reparametrised": with_the_global_seed(lambda s, x: torch.distributions.Normal(x @ s.W, (x @ s.W).exp()).rsample()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_seeded_numbers_are_constants(name: str) -> None:
    module, x, target = Formula(DRAWN[name], W=(4, 4)), draw(3, 4), draw(3, 4, seed=2)
    state = torch.get_rng_state()
    assert_readings(reverse_over_reverse(module, x, target, mse), module, x, target, floor=1e-12)
    assert torch.get_rng_state().equal(state)
