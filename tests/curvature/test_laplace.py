"""laplace-torch on hessiankit's matrices against its own backends, the matrix inverted here, and factors by autograd."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import RowsTimesMatrix
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hessiankit as hk
from hessiankit.curvature.approximating.laplace_backend import GaussNewtonBackend

try:
    import laplace
except ImportError:
    laplace = None
installed = pytest.mark.skipif(laplace is None, reason="laplace-torch is not installed")


def case(likelihood: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3, dtype=torch.float64)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), x, y


def fitted(backend: type, likelihood: str, structure: str, weights: str, batch: int):
    module, x, y = case(likelihood)
    options = {"subset_of_weights": weights, "hessian_structure": structure, "backend": backend, "prior_precision": 0.7}
    la = laplace.Laplace(copy.deepcopy(module), likelihood, **options)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
    return la, x


@installed
@pytest.mark.parametrize("batch", [30, 12, 1])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_covariances_are_those_of_laplace_torchs_own_backend(likelihood: str, structure: str, weights: str, batch: int) -> None:
    from laplace.curvature import CurvlinopsGGN

    from hessiankit.curvature.approximating.laplace_backend import HessiankitGGN

    ours, x = fitted(HessiankitGGN, likelihood, structure, weights, batch)
    known, _ = fitted(CurvlinopsGGN, likelihood, structure, weights, batch)
    torch.testing.assert_close(ours.loss, known.loss)
    for one, other in zip(ours(x[:4]), known(x[:4]), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@dataclass
class Factors:
    """The sum of laplace-torch's Kron: factor by factor."""

    kfacs: list[list[Tensor]]

    def __rmul__(self, scalar: float) -> Factors:
        return Factors([[scalar ** (1 / len(block)) * factor for factor in block] for block in self.kfacs])

    def __add__(self, other: Factors) -> Factors:
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return Factors([[x + y for x, y in zip(one, two, strict=True)] for one, two in pairs])

    def blocks(self) -> list[Tensor]:
        return [torch.kron(*block) if len(block) == 2 else block[0] for block in self.kfacs]


@contextmanager
def stand_in(module: nn.Module, likelihood: str) -> Iterator[GaussNewtonBackend]:
    """The backend with what laplace-torch's interface would set, and its class of factors."""
    backend = GaussNewtonBackend()
    backend.model, backend.params, backend.likelihood = module, list(module.parameters()), likelihood
    backend.factor, backend.stochastic, backend.subnetwork_indices = {"regression": 0.5}.get(likelihood, 1.0), False, None
    utils = ModuleType("laplace.utils")
    utils.Kron = Factors
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "laplace", ModuleType("laplace"))
        patch.setitem(sys.modules, "laplace.utils", utils)
        yield backend


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["classification", "regression"]),
    st.lists(st.tuples(st.sampled_from(["linear", "rows", "norm"]), st.integers(1, 4)), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_factors_of_batches_of_any_sizes_add_up_to_those_of_all_samples(
    likelihood: str, layers: list[tuple[str, int]], sizes: list[int], seed: int
) -> None:
    """Those of the operator, which test_approximations compares with gradients of single samples."""
    torch.manual_seed(seed)
    width, parts = 3, []
    for kind, outputs in layers:  # a norm of one entry is a constant
        if kind == "norm" and width > 1:
            parts += [nn.LayerNorm(width), nn.Tanh()]
        else:
            parts += [nn.Linear(width, outputs) if kind != "rows" else RowsTimesMatrix(width, outputs), nn.Tanh()]
            width = outputs
    module = nn.Sequential(*parts, nn.Linear(width, 2)).double()
    N = sum(sizes)
    x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.randint(2, (N,)) if likelihood == "classification" else torch.randn(N, 2, dtype=torch.float64)
    with stand_in(module, likelihood) as backend:
        results = [backend.kron(xb, yb, N) for xb, yb in zip(x.split(sizes), y.split(sizes), strict=True)]
    total = results[0][1]
    for _, other in results[1:]:
        total = total + other
    loss, factor = ("cross_entropy", 1.0) if likelihood == "classification" else ("mse", 0.5)
    G = hk.hessian_operator(module, x, y, loss=loss, kind="ggn", reduction="sum")
    torch.testing.assert_close(
        torch.block_diag(*total.blocks()), factor * G.approximation("kfac").to_matrix(), rtol=1e-9, atol=1e-11
    )
    assert float(sum(value for value, _ in results)) == pytest.approx(factor * G.loss, rel=1e-12)


def padded() -> tuple[nn.Module, Tensor, Tensor]:
    """Sums over tokens, of which sample 3 has one less: its last token is zero."""
    module = Formula(
        lambda m, x: m.last((torch.tanh(m.first(x)) * (x != 0).any(-1, keepdim=True)).sum(1)),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    x = draw(30, 2, 3)
    x[3, 1] = 0
    return module, x, torch.arange(30) % 3


def with_an_ignored_label() -> tuple[nn.Module, Tensor, Tensor]:
    module, x, y = case("classification")
    y[3] = -100
    return module, x, y


@pytest.mark.parametrize(
    ("problem", "said"), [(with_an_ignored_label, "labels of -100"), (padded, "'first.weight' has rows that count in some")]
)
def test_samples_that_count_differently_are_refused_in_one_of_several_batches(problem: Callable[[], Any], said: str) -> None:
    module, x, y = problem()
    with stand_in(module, "classification") as backend:
        with pytest.raises(hk.InputError, match=said):
            backend.kron(x[:10], y[:10], 30)
        backend.kron(x, y, 30)
