"""Operations that write in place: replaced by ones that do not, for every reader; refused where a derivative would be lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk


def residual(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    a = torch.tanh(y @ s.V)
    y += a
    y *= 2
    return torch.tanh(y)


def residual_out(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    return torch.tanh((y + torch.tanh(y @ s.V)) * 2)


def masked(s: Formula, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0] = True
    mask[:, 1] = True
    shift = torch.zeros(4, dtype=x.dtype)
    shift[2] = 3.0
    return (x @ s.W + shift).masked_fill_(mask, 0.5).tanh_() @ s.V


def filled(s: Formula, x: Tensor) -> Tensor:
    out = torch.empty(4, 4, dtype=x.dtype)
    return torch.tanh(out.copy_(x @ s.W)) @ s.V


def reused_constant(s: Formula, x: Tensor) -> Tensor:
    shift = torch.zeros(4, dtype=x.dtype)
    y = torch.tanh(x @ s.W * (shift + 1))
    shift.add_(2)
    return y * shift * (x @ s.V)


def grown(s: Formula, x: Tensor) -> Tensor:
    rows, others = (torch.tensor([], dtype=x.dtype) for _ in range(2))  # tensors without entries all lie at one address
    for row in x:
        rows, others = torch.cat([rows, row @ s.W]), torch.cat([others, row @ s.V])
    return torch.tanh(rows).view(4, 4) * others.view(4, 4)


def aliased(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    view = y.mT
    y += torch.tanh(y @ s.V)
    return torch.tanh(view)


def assigned(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    y[:, 0] = x[:, 0]
    return torch.tanh(y) @ s.V


def collected(s: Formula, x: Tensor) -> Tensor:
    out = torch.zeros(4, 4, dtype=x.dtype)
    for i in range(4):
        out[i] = x[i] @ s.W
    return torch.tanh(out) @ s.V


def aliased_out(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    return torch.tanh((y + torch.tanh(y @ s.V)).mT)


def into_an_empty_one(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    out = torch.cat([y.new_empty(4, 2), torch.empty_like(y[:, :2])], 1)
    out[:, :2].copy_(torch.tanh(y[:, 2:]))
    out[:, 2:] = y[:, :2] * torch.full_like(y[:, :2], 3.0)
    return out @ s.V


def recurrent(s: Formula, x: Tensor) -> Tensor:
    out = torch.zeros(4, 4, dtype=x.dtype)
    out[0] = x[0]
    for i in range(1, 4):
        out[i] = torch.tanh(out[i - 1].clone() @ s.W + x[i])
    return out @ s.V


def views_of_views(s: Formula, x: Tensor) -> Tensor:
    y, z = x @ s.W, x @ s.V
    columns = y.mT[1:]
    part = columns[:, ::2]
    part += z[0, :3].unsqueeze(1)  # columns 1 to 3 of the rows 0 and 2
    y[2:].mul_(z[:2])
    part.neg_()
    return torch.tanh(y) * torch.cat([columns, z[:1]])


def halves(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    left, right = y[:, :2], y[:, 2:]
    left += torch.tanh(right)
    right *= left
    return y @ s.V


def halves_out(s: Formula, x: Tensor) -> Tensor:
    left, right = (x @ s.W).chunk(2, 1)
    left = left + torch.tanh(right)
    return torch.cat([left, right * left], 1) @ s.V


def by_index(s: Formula, x: Tensor) -> Tensor:
    y, z = x @ s.W, x @ s.V
    y[x > 0] = 0.5
    y[torch.tensor([2, 0])] = z[:2]
    y[3] = torch.tanh(y[3])
    z.fill_(y[1, 1].clone())
    z[0].zero_()
    return torch.tanh(y) * z


WRITES: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "assignment to a part": assigned,
    "rows collected one by one": collected,
    "a buffer made for the result": filled,
    "into an empty one": into_an_empty_one,
    "each row from the one before": recurrent,
    "views of views": views_of_views,
    "masks and indices": by_index,
    "grown from nothing": grown,
    "masked": masked,
    "constant": reused_constant,
    "relu": lambda s, x: (x @ s.W).relu_() @ s.V,
    "a number read from a tensor": lambda s, x: (x @ s.W).tanh_() * x.max().item(),
    "view": lambda s, x: (x @ s.W).unsqueeze_(0).sub_(1, alpha=2).tanh_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_in_place_is_as_good_as_out_of_place(name):
    found = assert_exact(Formula(WRITES[name], W=(4, 4), V=(4, 4)), draw(4, 4))
    assert set(found.fallbacks) <= {"aten.index_put.default", "aten.cat.default"}


BEYOND_TORCH = {
    "another view is read": (aliased, aliased_out),
    "halves": (halves, halves_out),
    "residual": (residual, residual_out),
}
"""What autograd refuses, because it needs a value that has been written over, and the same out of place."""


@pytest.mark.parametrize("name", BEYOND_TORCH)
def test_what_autograd_refuses(name):
    inside, outside = (Formula(f, W=(4, 4), V=(4, 4)) for f in BEYOND_TORCH[name])
    x, target = draw(4, 4), draw(*inside(draw(4, 4)).shape, seed=7)
    with pytest.raises(hk.InputError, match=r"modified by an inplace operation.* handshake=False"):
        hk.hessian(inside, x, target)
    expected, found = assert_exact(outside, x, target), hk.hessian(inside, x, target, handshake=False)
    assert (found.matrix - expected.matrix).abs().max() <= 1e-13 * expected.matrix.abs().max()
    assert found.fallbacks == ()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_in_place_activations(activation):
    module = nn.Sequential(nn.Linear(4, 5), activation(inplace=True), nn.Linear(5, 3), nn.Tanh()).double()
    found = assert_exact(module, draw(3, 4))
    assert found.fallbacks == ()


def read_without_gradient(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    frozen = y.detach()
    y += x
    return frozen * y


def test_writing_beside_a_detached_reader_is_refused():
    with pytest.raises(hk.TraceError, match=r"aten\.add_\.Tensor writes into memory") as caught:
        hk.hessian(Formula(read_without_gradient, W=(4, 4), V=(4, 4)), draw(4, 4), draw(4, 4))
    assert "returns a new tensor" in str(caught.value)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (9, 2), (8, 2), (3, 3, 3)])
def test_a_filled_diagonal(shape: tuple[int, ...], wrap: bool) -> None:
    seen = torch.zeros(shape).fill_diagonal_(1.0, wrap)

    def filled(s: Formula, x: Tensor) -> Tensor:
        z = s.W * x
        z.fill_diagonal_(0.5, wrap)
        return z.exp()

    module = Formula(filled, W=shape)
    masked = Formula(lambda s, x: torch.where(seen == 1, 0.5, s.W * x).exp(), W=shape)
    target = draw(*shape, seed=4)
    expected = hk.hessian(masked, draw(1), target).matrix
    assert hk.hessian(module, draw(1), target).matrix.equal(expected)
    assert_exact(module, draw(1), target)


def assignments(seed: int) -> Callable[[Formula, Tensor], Tensor]:
    """A random program of views and of writes into them."""

    def view(t: Tensor, dice: random.Random) -> Tensor:
        if t.ndim == 0:
            return t
        row = dice.randrange(t.shape[0])
        return dice.choice([t.T if t.ndim == 2 else t[:], t[row], t[row:], t[..., ::2], t.unsqueeze(0), t.narrow(-1, 0, 1)])

    def write(t: Tensor, other: Tensor, dice: random.Random) -> None:
        new = other.clone().reshape(-1).repeat(20)[: t.numel()].reshape(t.shape)
        kind = dice.randrange(7)
        if kind == 0:
            t.add_(new)
        elif kind == 1:
            t.copy_(new)
        elif kind == 2:
            t.mul_(1.5)
        elif kind == 3:
            t.fill_(0.3)
        elif kind == 4:
            t.zero_()
        elif kind == 5:
            t.neg_()
        elif t.ndim:
            t[0] = new[0]

    def program(s: Formula, x: Tensor) -> Tensor:
        dice = random.Random(seed)
        tensors = [x @ s.W, x @ s.V, torch.zeros(4, 4, dtype=x.dtype)]
        total = (x @ s.W).sum() ** 2
        for _ in range(12):
            chosen = dice.choice(tensors)
            if dice.random() < 0.5:
                tensors.append(view(chosen, dice))
            else:
                write(chosen, dice.choice(tensors), dice)
                total = total + torch.tanh(dice.choice(tensors).clone()).sum()
        weights = (torch.arange(1, t.numel() + 1, dtype=x.dtype).reshape(t.shape) for t in tensors)
        return total + sum((torch.tanh(t.clone()) * w).sum() for t, w in zip(tensors, weights, strict=True))

    return program


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(k, marks=pytest.mark.slow) for k in range(6, 10))])
def test_random_writes_into_views(seed):
    module = Formula(assignments(seed), W=(4, 4), V=(4, 4))
    found = hk.hessian(module, draw(4, 4), loss=None)
    expected = reverse_over_reverse(module, draw(4, 4), None, None)
    assert (found.matrix - expected).abs().max() <= 1e-12 * expected.abs().max()
