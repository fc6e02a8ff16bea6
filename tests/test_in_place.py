"""Operations that write in place: replaced where nobody can tell, refused where somebody could."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
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


def masked_out(s: Formula, x: Tensor) -> Tensor:
    rows, columns = torch.arange(4).unsqueeze(1), torch.arange(4)
    z = x @ s.W + torch.tensor([0.0, 0.0, 3.0, 0.0], dtype=x.dtype)
    return torch.tanh(torch.where((rows == 0) | (columns == 1), 0.5, z)) @ s.V


def filled(s: Formula, x: Tensor) -> Tensor:
    out = torch.empty(4, 4, dtype=x.dtype)
    return torch.tanh(out.copy_(x @ s.W)) @ s.V


def reused_constant(s: Formula, x: Tensor) -> Tensor:
    shift = torch.zeros(4, dtype=x.dtype)
    y = torch.tanh(x @ s.W * (shift + 1))
    shift.add_(2)
    return y * shift * (x @ s.V)


REPLACED = {
    "residual": (residual, residual_out),
    "masked": (masked, masked_out),
    "constant": (reused_constant, lambda s, x: torch.tanh(x @ s.W) * 2 * (x @ s.V)),
    "relu": (lambda s, x: (x @ s.W).relu_() @ s.V, lambda s, x: (x @ s.W).clamp_min(0) @ s.V),
    "view": (lambda s, x: (x @ s.W).unsqueeze_(0).sub_(1, alpha=2).tanh_(), lambda s, x: torch.tanh((x @ s.W).unsqueeze(0) - 2)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_in_place_is_as_good_as_out_of_place(name):
    inside, outside = (Formula(f, W=(4, 4), V=(4, 4)) for f in REPLACED[name])
    x, target = draw(4, 4), draw(*inside(draw(4, 4)).shape, seed=7)
    assert torch.allclose(inside(x), outside(x), rtol=0, atol=1e-14)
    expected = assert_exact(outside, x, target)
    found = hk.hessian(inside, x, target)
    assert (found.matrix - expected.matrix).abs().max() <= 1e-13 * expected.matrix.abs().max()
    assert not any("_" in name.split(".")[1][-1:] for name in found.fallbacks)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_in_place_activations(activation):
    module = nn.Sequential(nn.Linear(4, 5), activation(inplace=True), nn.Linear(5, 3), nn.Tanh()).double()
    found = assert_exact(module, draw(3, 4))
    assert found.fallbacks == ()


def aliased(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    view = y.mT
    y += torch.tanh(y @ s.V)
    return torch.tanh(view)


def assigned(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    y[:, 0] = x[:, 0]
    return y


def clamped(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y @ s.V


def collected(s: Formula, x: Tensor) -> Tensor:
    out = torch.zeros(4, 4, dtype=x.dtype)
    for i in range(4):
        out[i] = x[i] @ s.W
    return out


def changed_input(s: Formula, x: Tensor) -> Tensor:
    x += 1
    return x @ s.W


def changed_buffer(s: Formula, x: Tensor) -> Tensor:
    s.calls += 1
    return x @ s.W * s.calls


def changed_after_use(s: Formula, x: Tensor) -> Tensor:
    shift = torch.zeros(4, dtype=x.dtype)
    half = shift[:2]
    y = torch.exp(x @ s.W * shift)
    shift.add_(2)
    return y * torch.cat([half, half])


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "another view is read": (aliased, r"aten\.add_\.Tensor writes into memory that other values"),
    "assignment to a part": (assigned, r"aten\.(copy_|fill_)\.\w+ writes into memory"),
    "with gradients switched off": (clamped, r"aten\.clamp_\.default writes into memory"),
    "rows collected one by one": (collected, r"aten\.copy_\.default writes into memory"),
    "an input": (changed_input, r"aten\.add_\.Tensor writes into an input, a parameter or a buffer"),
    "a buffer made for the result": (filled, r"aten\.copy_\.default writes into memory"),
    "a constant that was used": (changed_after_use, r"aten\.add_\.Tensor writes into memory"),
    "promoted": (
        lambda s, x: (x @ s.W).float().add_(x).double(),
        r"writes into a tensor of torch\.float32 what is torch\.float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_overwrite_something(name):
    f, message = REFUSED[name]
    with pytest.raises(hk.TraceError, match=message) as caught:
        hk.hessian(Formula(f, W=(4, 4), V=(4, 4)), draw(4, 4), draw(4, 4))
    assert "returns a new tensor" in str(caught.value)


def test_a_buffer_that_counts_calls_is_refused():
    module = Formula(changed_buffer, W=(4, 4))
    module.register_buffer("calls", torch.zeros((), dtype=torch.float64))
    with pytest.raises(hk.TraceError, match="a buffer of the module, which would change from call to call"):
        hk.hessian(module, draw(4, 4), draw(4, 4))
