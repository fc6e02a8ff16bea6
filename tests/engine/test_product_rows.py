"""Chains of many small operations: rows of the Hessian as products with unit vectors, chosen from shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_reference import draw, gauss_newton, largest_error, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import streaming
from hessiankit.engine import assembly, diagonal_sum, parts, product_rows


class Recurrent(nn.Module):
    """A loop over shared weights."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inward, self.across, self.out = nn.Linear(2, width), nn.Linear(width, width, bias=False), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.across.in_features, dtype=x.dtype)
        for step in range(x.shape[1]):
            h = torch.tanh(self.inward(x[:, step]) + self.across(h))
        return self.out(h)


STEPS = 24
X, T = draw(5, STEPS, 2), draw(5, 1, seed=2)


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products alone, also where sweeps would take less: of the diagonal of a chain as short as this."""

    def read(*given: Any) -> None:
        raise AssertionError("a sweep of a long chain")

    monkeypatch.setattr(parts.BatchPart, "is_long", True)
    monkeypatch.setattr(assembly.BlockRows, "read", read)
    monkeypatch.setattr(diagonal_sum, "read_diagonal", read)


def module() -> nn.Module:
    return randomised(Recurrent())


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"params": ["across.weight", "out.bias"]}])
def test_the_whole_matrix(options: dict[str, Any]) -> None:
    net = module()
    H = hk.hessian(net, X, T, **options)
    assert largest_error(H, reverse_over_reverse(net, X, T, mse, H.names)) <= 1e-12
    assert H.asymmetry <= 1e-13
    assert H.loss == pytest.approx(mse(net(X), T).item(), rel=1e-14)


def test_blocks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    expected = reverse_over_reverse(net, X, T, mse)
    lazy = hk.hessian(net, X, T, lazy=True)
    rows, columns = lazy.slices["inward.weight"], lazy.slices["across.weight"]
    block = lazy.block("inward.weight", "across.weight")
    assert float((block - expected[rows, columns]).abs().max()) <= 1e-12 * float(expected.abs().max())
    monkeypatch.setattr(streaming, "PANEL", 1500)
    H = hk.hessian(net, X, T, out=tmp_path / "h.npy", overwrite=True)
    assert largest_error(H, expected) <= 1e-12


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_diagonal(kind: str, batch_size: int | None) -> None:
    net = module()
    expected = (reverse_over_reverse if kind == "hessian" else gauss_newton)(net, X, T, mse).diagonal()
    diagonal = hk.hessian_diagonal(net, X, T, kind=kind, batch_size=batch_size)
    assert float((diagonal.flat - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    with pytest.raises(hk.InputError, match=r"as long as about 33 products"):
        hk.hessian_diagonal(net, X, T, max_products=32)


def test_the_gradient_is_compared_with_the_modules_own() -> None:
    net = module()
    net.across.weight.register_hook(lambda slope: 2 * slope)
    for call in (hk.hessian, hk.hessian_diagonal):
        with pytest.raises(hk.TraceError, match="a hook on the parameter"):
            call(net, X, T)
        call(net, X, T, handshake=False)


def test_the_choice_follows_shapes() -> None:
    """Short and wide networks are swept; long and narrow ones are not."""
    from hessiankit.engine.cost import sweep_cost
    from hessiankit.engine.paths import Paths
    from hessiankit.engine.sections import sections
    from hessiankit.request.loss_trace import loss_trace
    from hessiankit.request.read import read_request

    def chosen(net: nn.Module, x: Tensor, t: Tensor, *, alone: bool = False) -> bool:
        batch = read_request(net, x, t).only()
        paths = Paths(loss_trace(batch).trace, by_column=alone)
        return product_rows.products_are_cheaper(
            sweep_cost(paths, sections(paths, is_diagonal=alone), is_diagonal=alone), paths.trace, batch.size, 8
        )

    deep = randomised(nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(6, 6), nn.Tanh())]))
    wide = randomised(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30)))
    assert chosen(module(), X, T)
    assert not chosen(deep, draw(2, 6), draw(2, 6), alone=True)  # no parameter is used twice: linear in the length
    assert not chosen(wide, draw(64, 30), draw(64, 30))
