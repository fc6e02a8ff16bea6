"""Operations that write in place: replaced by ones that do not, for every reader; refused where a derivative would be lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, reverse_over_reverse
from torch import Tensor

import hessiankit as hk


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


def aliased_out(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    return torch.tanh((y + torch.tanh(y @ s.V)).mT)


def into_an_empty_one(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    out = torch.cat([y.new_empty(4, 2), torch.empty_like(y[:, :2])], 1)
    out[:, :2].copy_(torch.tanh(y[:, 2:]))
    out[:, 2:] = y[:, :2] * torch.full_like(y[:, :2], 3.0)
    return out @ s.V


def by_index(s: Formula, x: Tensor) -> Tensor:
    y, z = x @ s.W, x @ s.V
    y[x > 0] = 0.5
    y[torch.tensor([2, 0])] = z[:2]
    y[3] = torch.tanh(y[3])
    z.fill_(y[1, 1].clone())
    z[0].zero_()
    return torch.tanh(y) * z


WRITES: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "into an empty one": into_an_empty_one,
    "masks and indices": by_index,
    "grown from nothing": grown,
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


def test_writing_beside_a_detached_reader_is_refused():
    module = Formula(lambda s, x: (y := x @ s.W).detach() * y.add_(x), W=(4, 4))
    with pytest.raises(hk.TraceError, match=r"aten\.add_\.Tensor writes into memory.* returns a new tensor"):
        hk.hessian(module, draw(4, 4), draw(4, 4))


@pytest.mark.parametrize(("shape", "wrap"), [((3, 5), False), ((9, 2), False), ((9, 2), True), ((3, 3, 3), False)])
def test_a_filled_diagonal(shape: tuple[int, ...], wrap: bool) -> None:
    def filled(s: Formula, x: Tensor) -> Tensor:
        z = s.W * x
        z.fill_diagonal_(0.5, wrap)
        return z.exp()

    assert_exact(Formula(filled, W=shape), draw(1), draw(*shape, seed=4))


WRITE: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    Tensor.add_,
    Tensor.copy_,
    lambda t, _: t.mul_(1.5),
    lambda t, _: t.fill_(0.3),
    lambda t, _: t.zero_(),
    lambda t, _: t.neg_(),
    lambda t, new: t.ndim and t.__setitem__(0, new[0]),
)


def assignments(seed: int) -> Callable[[Formula, Tensor], Tensor]:
    """A random program of views and of writes into them."""

    def view(t: Tensor, dice: random.Random) -> Tensor:
        if t.ndim == 0:
            return t
        row = dice.randrange(t.shape[0])
        return dice.choice([t.T if t.ndim == 2 else t[:], t[row], t[row:], t[..., ::2], t.unsqueeze(0), t.narrow(-1, 0, 1)])

    def program(s: Formula, x: Tensor) -> Tensor:
        dice = random.Random(seed)
        tensors = [x @ s.W, x @ s.V, torch.zeros(4, 4, dtype=x.dtype)]
        total = (x @ s.W).sum() ** 2
        for _ in range(12):
            chosen = dice.choice(tensors)
            if dice.random() < 0.5:
                tensors.append(view(chosen, dice))
            else:
                new = dice.choice(tensors).clone().reshape(-1).repeat(20)[: chosen.numel()].reshape(chosen.shape)
                dice.choice(WRITE)(chosen, new)
                total = total + torch.tanh(dice.choice(tensors).clone()).sum()
        weights = (torch.arange(1, t.numel() + 1, dtype=x.dtype).reshape(t.shape) for t in tensors)
        return total + sum((torch.tanh(t.clone()) * w).sum() for t, w in zip(tensors, weights, strict=True))

    return program


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(k, marks=pytest.mark.slow) for k in range(6, 10))])
def test_random_writes_into_views(seed):
    module, x = Formula(assignments(seed), W=(4, 4), V=(4, 4)), draw(4, 4)
    expected = reverse_over_reverse(module, x, None, None)
    assert (hk.hessian(module, x, loss=None).matrix - expected).abs().max() <= 1e-12 * expected.abs().max()


FUNCTIONS = (
    "abs", "ceil", "cos", "digamma", "erf", "erfinv", "exp", "floor", "lgamma", "log", "log1p", "logit", "neg", "reciprocal",
    "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "squeeze", "t", "tan", "tanh", "tril", "triu",
    "trunc", "zero",
)  # fmt: skip
WITH_A_NUMBER_OR_A_TENSOR = (
    "add", "clamp_max", "clamp_min", "copysign", "div", "float_power", "fmod", "less", "mul", "pow", "remainder", "sub", "xlogy",
)  # fmt: skip
WITH_A_TENSOR = ("arctan2", "atan2", "copy", "hypot", "ldexp")


def methods() -> dict[str, list[tuple[Any, ...]]]:
    """Methods of torch that write in place, with arguments for a tensor (3, 4) of numbers between 0 and 1."""
    whole, rows, at = draw(3, 4).sigmoid(), draw(2, 4, seed=1).sigmoid(), torch.tensor([0, 2])
    table: dict[str, list[tuple[Any, ...]]] = {f"{name}_": [()] for name in FUNCTIONS}
    table |= {f"{name}_": [(0.3,), (whole,)] for name in WITH_A_NUMBER_OR_A_TENSOR}
    table |= {f"{name}_": [(whole,)] for name in WITH_A_TENSOR}
    table |= {f"{name}_": [(0.5,)] for name in ("eq", "ge", "gt", "ne")}
    table |= {f"{name}_": [(0,)] for name in ("cumprod", "cumsum", "unsqueeze")}
    table |= {f"{name}_": [(0, 1)] for name in ("swapaxes", "swapdims", "transpose")}
    table |= {f"{name}_": [(whole, whole)] for name in ("addcdiv", "addcmul")}
    return table | {
        "addmm_": [(whole[:, :3], whole)],
        "addr_": [(whole[:, 0], whole[0])],
        "clamp_": [(0.4, 0.6)],
        "fill_": [(2.0,)],
        "fill_diagonal_": [(2.0,)],
        "index_add_": [(0, at, rows)],
        "index_copy_": [(0, at, rows)],
        "index_fill_": [(0, at, 2.0)],
        "index_put_": [((at,), rows)],
        "lerp_": [(whole, 0.3), (whole, whole)],
        "masked_fill_": [(whole > 0.5, 2.0)],
        "masked_scatter_": [(whole > 0.5, whole)],
        "mvlgamma_": [(1,)],
        "polygamma_": [(1,)],
        "put_": [(at, rows[0, :2])],
        "renorm_": [(2, 0, 0.5)],
        "scatter_": [(0, at[None].expand(2, 2), rows), (0, at[None], 1.5)],
        "scatter_add_": [(0, at[None].expand(2, 2), rows)],
    }


@pytest.mark.parametrize("constant", [False, True])
def test_every_method_that_writes_in_place(constant: bool) -> None:
    x, off = draw(3, 4, seed=2).sigmoid() / 2 + 0.3, list[str]()
    for name, calls in methods().items():
        for arguments in calls:

            def program(s: Formula, x: Tensor, name: str = name, arguments: tuple[Any, ...] = arguments) -> Tensor:
                y = x.clone() if constant else x * torch.tanh(s.W + 2)
                return (getattr(y, name)(*arguments) ** 2).sum() * s.W.sum() + (s.W**3).sum()

            module = Formula(program, W=(3, 4))
            expected = reverse_over_reverse(module, x, None, None)
            gap = (hk.hessian(module, x, loss=None).matrix - expected).abs().max() / expected.abs().max()
            off += [] if gap <= 1e-10 else [f"{name}{arguments}: {gap:.1e}"]
    assert off == []
