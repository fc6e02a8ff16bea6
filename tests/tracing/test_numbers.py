"""Numbers that a module or a loss reads out of tensors or draws from a seed: constants to autograd; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, cross_entropy, draw, mse, reverse_over_reverse
from readings import assert_readings, in_turn
from torch import Tensor, nn

import hessiankit as hk

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, of the user's own line

LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0])
EPS = 1e-12
"""Of the largest entry."""

KEPT: list[Any] = []


def kept(function: Callable[[Tensor], Any]) -> Callable[[Tensor], float]:
    def number(h: Tensor) -> float:
        KEPT.append(function(h))
        return 1.0

    return number


READS: dict[str, Callable[[Tensor], Any]] = {
    "kept: item": kept(lambda h: h.square().sum().item()),
    "kept: float": kept(lambda h: float(h.sum())),
    "kept: tolist": kept(lambda h: h.tolist()),
    "kept: text": kept(lambda h: f"{h.sum():.3f} {h}"),
    "kept: array": kept(lambda h: h.detach().cpu().numpy()),
    "item": lambda h: h.square().sum().item(),
    "float": lambda h: float(h.abs().sum()) ** 2,
    "int": lambda h: int(10 * h.square().sum()),
    "complex": lambda h: abs(complex(h.sum())),
    "rounded": lambda h: round(h.abs().sum().item(), 2),
    "list": lambda h: max(h.reshape(-1).tolist()),
    "array": lambda h: float(np.asarray(h.detach()).std()),
    "array on the memory": lambda h: torch.from_numpy(h.detach().numpy()).exp().mean(),
    "tensor of it": lambda h: torch.tensor([h.square().sum(), 2.0], dtype=h.dtype).sum(),
    "tensor of numbers": lambda h: torch.tensor(h.tolist(), dtype=h.dtype).square().sum(),
    "text": lambda h: float(f"{h.square().sum():.4f}"),
    "without gradients": torch.no_grad()(lambda h: h.square().mean().item()),
    "branch": lambda h: h.square().mean() if h.square().mean().item() > 0.01 else 1.0,
    "branch of a truth value": lambda h: h.sin().mean() if (h > 0).any() and not torch.allclose(h, 0 * h) else 1.0,
    "loop": lambda h: sum((h[k].square().sum() for k in range(1 + int(h.abs().sum()) % 3)), h.new_zeros(())),
    "index": lambda h: h[int(h.detach().sum(-1).argmax())].square().sum(),
}


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= EPS * float(expected.abs().max())


@pytest.mark.parametrize("where", ["forward", "loss"])
@pytest.mark.parametrize(("k", "name"), enumerate(READS))
def test_a_number_is_a_constant(k, name, where):
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.W)
        return (h * READS[name](h) if where == "forward" else h) @ s.V

    def loss(z: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(z, labels) * (READS[name](z) if where == "loss" else 1.0)

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    expected = reverse_over_reverse(module, x, LABELS, loss)
    assert_readings(expected, module, x, LABELS, loss=loss, readings=in_turn(k))


COUPLED: dict[str, Callable[[Tensor], Any]] = {
    "a mean": lambda h: h.square().mean().item(),
    "a mean without gradients": lambda h: h.detach().square().mean().item(),
    "the sign of a mean": lambda h: 2.0 if h.mean() > 0 else 0.5,
    "any": lambda h: 2.0 if (h.square().sum(-1) > 0.9 * h.square().sum(-1).max()).sum() < len(h) else 0.5,
    "a count": lambda h: float((h > 0).sum()),
    "a rounded mean": lambda h: round(h.abs().mean().item(), 1) + 0.5,
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("handshake", [True, False])
def test_samples_that_a_number_couples_are_not_treated_apart(name, handshake):
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.W)
        return h * COUPLED[name](h) @ s.V

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    expected = reverse_over_reverse(module, x, LABELS, cross_entropy)
    options = {"loss": "cross_entropy", "batch_size": 1, "handshake": handshake}
    assert close(hk.hessian(module, x, LABELS, **options).matrix, expected)
    assert close(hk.hessian_diagonal(module, x, LABELS, **options).flat, expected.diagonal())
    with pytest.raises(hk.TraceError, match=r"samples depend on each other, .* a number that is read from all of them"):
        hk.hessian_operator(module, x, LABELS, loss="cross_entropy", micro_batch=1, handshake=handshake)


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


def test_each_batch_has_numbers_of_its_own():
    def loss(z: Tensor, labels: Tensor) -> Tensor:
        value = cross_entropy(z, labels)
        return value * (1.0 + value.item()) if value.item() > 0.5 else value.square()

    module, x = Formula(lambda s, x: torch.tanh(x @ s.W) @ s.V, W=(3, 4), V=(4, 2)), draw(7, 3)
    parts = [(x[:3], LABELS[:3]), (x[3:], LABELS[3:])]
    expected = sum(weight * reverse_over_reverse(module, *part, loss) for weight, part in zip((3 / 7, 4 / 7), parts, strict=True))
    assert close(hk.hessian(module, parts, loss=loss, weights=[3, 4]).matrix, expected)
    assert close(hk.hessian_operator(module, parts, loss=loss, weights=[3, 4]).to_matrix(), expected)
    assert close(hk.hessian_diagonal(module, parts, loss=loss, weights=[3, 4]).flat, expected.diagonal())


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


@pytest.mark.parametrize("seed", range(5))
def test_ties_that_rounding_breaks_are_right_or_refused(seed):
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.softmax(torch.nn.functional.group_norm(x @ s.W, 1), -1)
        return (h + h[int(h.detach().sum(-1).argmax())]) @ s.V  # every row sums to 1

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3, seed=seed)
    try:
        found = hk.hessian(module, x, LABELS, loss="cross_entropy").matrix
    except hk.TraceError as error:
        found, message = None, str(error)
    if found is None:
        assert "rounding decides what it computes" in message
    else:
        assert close(found, reverse_over_reverse(module, x, LABELS, cross_entropy))


def test_values_that_only_autograd_knows_may_become_numbers():
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.W)
        return h * torch.vmap(lambda row: row.norm())(h).mean().item() @ s.V

    module, x = Formula(forward, W=(3, 4), V=(4, 2)), draw(7, 3)
    expected = reverse_over_reverse(module, x, LABELS, cross_entropy)
    assert_readings(expected, module, x, LABELS, loss="cross_entropy")


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
    "uniform": lambda s, x: (x @ s.W).exp() * torch.rand((3, 4), generator=seeded(), dtype=x.dtype),
    "in place": written_in_place,
    "integers": lambda s, x: (x @ s.W).exp()[torch.randperm(3, generator=seeded())] * torch.randint(5, (4,), generator=seeded()),
    "of moving probabilities": lambda s, x: (
        (p := (x @ s.W).sigmoid()) * torch.bernoulli(p, generator=seeded()) + torch.multinomial(p, 1, generator=seeded()) * p
    ),
    "of the shape of a moving value": with_the_global_seed(lambda s, x: (z := (x @ s.W).tanh()) * torch.randn_like(z) + z**2),
    "dropout": with_the_global_seed(lambda s, x: F.dropout((x @ s.W).exp(), 0.3, training=True)),
    "dropout of channels": with_the_global_seed(lambda s, x: F.dropout1d((x @ s.W).exp(), 0.5, training=True)),
    "alpha dropout": with_the_global_seed(lambda s, x: F.alpha_dropout((x @ s.W).exp(), 0.3, training=True)),
    "leaky by chance": with_the_global_seed(lambda s, x: F.rrelu(x @ s.W, training=True).sin()),
    "gumbel": with_the_global_seed(lambda s, x: F.gumbel_softmax(x @ s.W, tau=0.7)),
    "reparametrised": with_the_global_seed(lambda s, x: torch.distributions.Normal(x @ s.W, (x @ s.W).exp()).rsample()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_seeded_numbers_are_constants(name: str) -> None:
    module, x, target = Formula(DRAWN[name], W=(4, 4)), draw(3, 4), draw(3, 4, seed=2)
    state = torch.get_rng_state()
    expected = reverse_over_reverse(module, x, target, mse)
    assert hk.hessian(module, x, target).matrix.allclose(expected, rtol=0, atol=1e-12)
    assert hk.hessian_operator(module, x, target).to_matrix().allclose(expected, rtol=0, atol=1e-12)
    assert hk.hessian_diagonal(module, x, target).flat.allclose(expected.diagonal(), rtol=0, atol=1e-12)
    assert torch.get_rng_state().equal(state)


RANDOM: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "in place": lambda s, x: x @ s.W * torch.empty(4).uniform_(),
    "a layer made on the way": lambda s, x: nn.Linear(4, 4).double()(x @ s.W),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("call", [hk.hessian, hk.check])
def test_numbers_without_a_seed_are_refused(call: Callable[..., object], name: str) -> None:
    with pytest.raises(hk.InputError, match=r"give different losses .* it draws random numbers"):
        call(Formula(RANDOM[name], W=(4, 4)), draw(3, 4), draw(3, 4, seed=2))


def test_a_draw_that_changes_nothing_is_no_matter() -> None:
    assert_exact(Formula(lambda s, x: (x @ s.W + 0 * torch.randn(4)).sin(), W=(4, 4)), draw(3, 4))
