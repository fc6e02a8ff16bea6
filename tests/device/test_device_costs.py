"""What a call costs on a device: waits for it and transfers, which the pretended device counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_cases import DEVICE, Case, cases, default_device
from torch import Tensor, nn

import hessiankit as hk

if DEVICE != "pretended":
    pytest.skip("only the pretended device counts", allow_module_level=True)
import pretended

pytestmark = pytest.mark.first_order  # the costs of the default


def deep(layers: int = 6, dtype: torch.dtype = torch.float64) -> Case:
    """Return a language model with more than a hundred parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(11, 8), *(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(layers))
    )
    tokens = torch.randint(11, (2, 5))
    return Case(module.to(dtype).eval(), tokens, torch.randn(2, 5, 8, dtype=dtype), "mse").on(DEVICE)


def costs(run: Callable[[], Any]) -> tuple[Any, Counter[str], list[str]]:
    """Return a result, the counts, and the operations that waited."""
    waits: list[str] = []
    with pretended.counted(lambda kind, operation: waits.append(f"{kind}: {operation}")) as counts:
        result = run()
    return result, counts, waits


@pytest.mark.parametrize("layers", [2, 8])
def test_the_set_up_of_an_operator_waits_a_few_times_for_any_number_of_parameters(layers: int) -> None:
    case = deep(layers)
    _, counts, waits = costs(lambda: hk.hessian_operator(case.module, *case.data, loss=case.loss))
    assert counts["wait"] <= 20, Counter(waits)


def test_neither_waits_more_above_four_million_parameters() -> None:
    module = nn.Sequential(nn.Linear(1500, 1500), nn.LayerNorm(1500), nn.Tanh(), nn.Linear(1500, 1500)).to(DEVICE)
    x = torch.randn(2, 1500, device=DEVICE)
    H, counts, waits = costs(lambda: hk.hessian_operator(module, x, x))
    assert counts["wait"] <= 20, Counter(waits)
    v = torch.randn(H.shape[0], device=DEVICE)
    H @ v
    _, counts, waits = costs(lambda: H @ v)
    assert set(counts) == {"launch"}, Counter(waits)


@pytest.mark.parametrize("options", [{}, {"recompute": "layers"}, {"snapshot": False}], ids=str)
def test_a_later_product_waits_for_nothing(options: dict[str, Any]) -> None:
    case = deep()
    H = hk.hessian_operator(case.module, *case.data, loss=case.loss, **options)
    vectors = torch.randn(H.shape[0], 2, dtype=H.torch_dtype, device=DEVICE)
    H @ vectors
    _, counts, waits = costs(lambda: H @ vectors)
    assert set(counts) == {"launch"}, Counter(waits)


def test_a_diagonal_is_read_once_to_be_printed() -> None:
    case = deep()
    diagonal = hk.hessian_diagonal(case.module, *case.data, loss=case.loss)
    _, counts, waits = costs(lambda: (str(diagonal), diagonal.to_dict()))
    assert counts["wait"] == 1, Counter(waits)


def test_a_system_is_solved_on_the_device() -> None:
    case = cases(torch.float32)["encoder"].on(DEVICE)
    G = hk.hessian_operator(case.module, *case.data, loss=case.loss, kind="ggn")
    b = torch.randn(G.shape[0], dtype=torch.float32, device=DEVICE)
    G @ torch.stack([b, b.flip(0)], 1)
    for method in ("cg", "minres", "lsmr"):
        found, counts, _ = costs(lambda method=method: G.solve(b, damping=1.0, method=method))
        assert found.converged
        assert counts["to device"] == counts["to host"] == 0


def test_a_matrix_on_the_device_stays_there_to_be_printed() -> None:
    case = cases(torch.float64)["encoder"].on(DEVICE)
    H = hk.hessian(case.module, *case.data, loss=case.loss)
    _, counts, waits = costs(lambda: str(H))
    assert counts["to host"] == 0, Counter(waits)


def test_the_parameters_that_an_operator_shares_are_watched() -> None:
    case = deep()
    H = hk.hessian_operator(case.module, *case.data, loss=case.loss, snapshot=False)
    with torch.no_grad():
        next(case.module.parameters()).mul_(2)
    with pytest.raises(hk.InputError, match="has been given other values"):
        H @ torch.ones(H.shape[0], dtype=H.torch_dtype, device=DEVICE)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "sum of two devices": lambda x: x + torch.ones(2, 3),
    "product of two devices": lambda x: x @ torch.ones(3, 2),
    "joined": lambda x: torch.cat([x, torch.ones(2, 3)]),
    "looked up": lambda x: nn.functional.embedding(torch.tensor([0]), x),
    "written on the host": lambda x: torch.ones(2, 3).add_(x),
    "drawn by the host": lambda x: torch.rand(3, device=DEVICE, generator=torch.Generator()),
    "integers": lambda x: x.long() @ x.long().T,
    "differentiated twice": lambda x: twice(x.expand(1, 1, 2, 3).clone().requires_grad_()),
}


def twice(q: Tensor) -> Tensor:
    """Return a second derivative through fused attention, in float32."""
    y = nn.functional.scaled_dot_product_attention(q, q, q)
    (slope,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    return torch.autograd.grad(slope.sum(), q)[0]


@pytest.mark.parametrize("what", REFUSED)
def test_the_device_refuses_what_a_gpu_refuses(what: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device|device type for generator|not implemented"):
        REFUSED[what](torch.ones(2, 3, device=DEVICE))


def test_the_device_counts() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with pretended.counted() as counts:
        (x @ x).T[1:].sum().item()
        x.cpu()
    assert counts == {"launch": 2, "wait": 2, "to host": 1}


def test_the_device_is_the_cpu_bit_for_bit() -> None:
    """Training steps of a small model, and draws."""

    def steps(device: str | None) -> list[Tensor]:
        with default_device(device):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))
            x = torch.randn(3, 4)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for a, b in zip(steps(None), steps(DEVICE), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
