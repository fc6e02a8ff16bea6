"""Random numbers drawn within a module from a seed of its own are constants; without a seed the loss is no function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw, mse, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def in_place(s: Formula, x: Tensor) -> Tensor:
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
    "in place": in_place,
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
