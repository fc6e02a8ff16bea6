"""Derivatives that are not finite at entries that do not move, or are not read, beside torch and central differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import by_differences, reverse_over_reverse
from readings import assert_readings, in_turn
from torch import Tensor, nn

import hessiankit as hk

ABSENT = torch.tensor([[False] * 5, [True] * 5, [False, True, True, False, True], [False] * 5])
COLUMN = torch.tensor([False, False, False, True, False])
DEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of rows of zeros": lambda h: F.relu(h - 50 * ABSENT[:, :1]).norm(dim=-1),
    "deviation of rows of zeros": lambda h: F.relu(h - 50 * ABSENT[:, :1]).std(-1),
    "power 1.5": lambda h: F.relu(h) ** 1.5,
    "root": lambda h: F.relu(h).sqrt(),
    "root of two": lambda h: torch.hypot(F.relu(h), F.relu(-h)),
    "angle": lambda h: torch.where(h > 0, torch.atan2(F.relu(h), F.relu(h) ** 2), 0.0),
    "logarithm not read": lambda h: torch.where(h > 0, torch.log(h.clamp_min(0)), 0 * h),
    "logarithm filled": lambda h: F.relu(h).log().masked_fill(h <= 0, 0.0),
    "quotient not read": lambda h: torch.where(h > 0, 2 / (F.relu(h) + (h > 0)), h),
    "infinity replaced": lambda h: (z := 1 / F.relu(h)).masked_fill(z.isinf(), 0.0),
    "x log x": lambda h: torch.xlogy(F.relu(h), F.relu(h)),
    "entropy": lambda h: torch.special.entr(F.relu(h)),
    "arcosh": lambda h: torch.acosh(1 + F.relu(h)),
    "masked softmax": lambda h: h.masked_fill(ABSENT, -torch.inf).softmax(-1).nan_to_num() * h,
    "masked log softmax": lambda h: h.masked_fill(ABSENT, -torch.inf).log_softmax(-1).nan_to_num(neginf=0.0),
    "softmax over rows": lambda h: (z := h.masked_fill(COLUMN, -torch.inf).softmax(0)).masked_fill(z.isnan(), 1),
}


class Units(nn.Module):
    """Units of which one is dead for every sample and others for some."""

    def __init__(self, f: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lin, self.f = nn.Linear(3, 5), f
        nn.init.constant_(self.lin.bias[:1], -20.0)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(self.lin(x))
        return (z.sin() + z * z).sum()


def data(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("k", "name"), enumerate(DEAD))
def test_entries_that_do_not_move_or_are_not_read(k: int, name: str) -> None:
    module, x = Units(DEAD[name]), data()
    expected, by_torch = (
        by_differences(module.parameters, lambda: module(x), step=1e-4),
        reverse_over_reverse(module, x, None, None),
    )
    found, size = hk.hessian(module, x, loss=None).matrix, expected.abs().max()
    assert (found - expected).abs().max() < 1e-6 * size
    if bool(by_torch.isfinite().all()):
        assert (found - by_torch).abs().max() < 1e-12 * size
        assert k % 9 or hk.check(module, x, loss=None)
    assert_readings(found, module, x, loss=None, readings=in_turn(k), floor=1e-12)
    single = hk.hessian(Units(DEAD[name], torch.float32), data(torch.float32), loss=None).matrix
    assert (single - found).abs().max() < 2e-5 * size


MOVING: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: h.norm(dim=-1),
    "root": lambda h: h.abs().sqrt(),
    "root that cancels": lambda h: (h * h).sqrt(),
    "square of a root": lambda h: (h * h).sqrt() ** 2,
    "entropy": lambda h: torch.special.entr(h * h),
    "arcosine": lambda h: torch.acos(1 - h * h),
}


@pytest.mark.parametrize("name", MOVING)
def test_an_entry_that_moves_is_refused_by_all(name: str) -> None:
    module, x = Units(MOVING[name]), data()
    x[1] = 0
    nn.init.zeros_(module.lin.bias)
    for call in (
        lambda: hk.hessian(module, x, loss=None, handshake=False),
        lambda: hk.hessian(module, x, loss=None),
        lambda: hk.hessian_operator(module, x, loss=None).to_matrix(),
        lambda: hk.hessian_diagonal(module, x, loss=None),
        lambda: hk.check(module, x, loss=None),
    ):
        with pytest.raises(hk.HessiankitError, match="NaN or infinite"):
            call()


def test_torch_s_own_gradient_that_is_not_a_number_is_named() -> None:
    module = Units(lambda h: torch.where(h > 0, h.cos() / F.relu(h), h))
    with pytest.raises(hk.TraceError, match="own gradient with respect to 'lin\\.weight' is NaN or infinite where that"):
        hk.hessian(module, data(), loss=None)
