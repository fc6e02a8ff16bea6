"""laplace-torch on hessiankit's matrices against its own backends, the matrix inverted here, and factors by autograd."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@installed
def test_the_variance_of_a_line_is_that_of_least_squares_for_any_size_of_batches() -> None:
    """Gradients of the output: (x, 1); KFAC keeps weight and bias apart: precisions sum x^2 + 1 and 100 + 1."""
    from hessiankit.curvature.approximating.laplace_backend import HessiankitGGN

    torch.manual_seed(0)
    x, y = torch.randn(100, 1, dtype=torch.float64), torch.randn(100, 1, dtype=torch.float64)
    for batch in (100, 30, 7):
        la = laplace.Laplace(
            nn.Linear(1, 1).double(), "regression", subset_of_weights="all", hessian_structure="kron", backend=HessiankitGGN
        )
        la.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
        expected = x[:5, 0].square() / (x.square().sum() + 1) + 1 / 101
        torch.testing.assert_close(la(x[:5])[1].flatten(), expected, rtol=1e-6, atol=0.0)


@installed
def test_batches_add_up_to_the_whole_and_norms_have_their_diagonal() -> None:
    from hessiankit.curvature.approximating.laplace_backend import HessiankitGGN

    one, _ = fitted(HessiankitGGN, "classification", "full", "all", 30)
    two, _ = fitted(HessiankitGGN, "classification", "full", "all", 12)
    torch.testing.assert_close(one.H, two.H, rtol=1e-12, atol=1e-14)
    module, x, y = case("classification")
    module = nn.Sequential(module[0], nn.LayerNorm(4).double(), module[2])
    loss, kron = HessiankitGGN(module, "classification").kron(x, y, len(x))
    G = hk.hessian_operator(module, x, y, loss="cross_entropy", kind="ggn", reduction="sum")
    torch.testing.assert_close(kron.to_matrix(), G.approximation("kfac").to_matrix())
    torch.testing.assert_close(loss, nn.functional.cross_entropy(module(x), y, reduction="sum").detach())


@installed
def test_data_fitted_later_add_up_to_all_of_them() -> None:
    from hessiankit.curvature.approximating.laplace_backend import HessiankitGGN

    module, x, y = case("regression")
    options = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": HessiankitGGN}
    module = RowsTimesMatrix.between(module)
    whole, later = (laplace.Laplace(copy.deepcopy(module), "regression", **options) for _ in range(2))
    whole.fit(DataLoader(TensorDataset(x, y), batch_size=30))
    for part in (slice(0, 10), slice(10, 30)):
        later.fit(DataLoader(TensorDataset(x[part], y[part]), batch_size=4), override=False)
    torch.testing.assert_close(later.H_facs.to_matrix(), whole.H_facs.to_matrix(), rtol=1e-10, atol=1e-12)


class RowsTimesMatrix(nn.Module):
    """x W + b with W stored as (inputs, outputs), as GPT-2 does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias

    @classmethod
    def between(cls, module: nn.Module) -> nn.Module:
        return nn.Sequential(module[0], module[1], cls(4, 4), module[2])


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


def kfac_by_autograd(module: nn.Sequential, x: Tensor, y: Tensor, likelihood: str) -> list[Tensor]:
    """A (x) G of every weight, G of every bias, the diagonal of every gain: sums over samples of plain Jacobians."""
    read: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def keep(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        read[id(layer)], made[id(layer)] = inputs[0].detach(), output

    sums: dict[int, list[Tensor]] = {}
    gains = {id(p): torch.zeros_like(p) for p in module.parameters()}
    handles = [layer.register_forward_hook(keep) for layer in module]
    for n in range(len(x)):
        z = module(x[n : n + 1])[0]
        p = torch.softmax(z, 0).detach()
        middle = torch.eye(len(z)).to(z) if likelihood == "regression" else torch.diag(p) - torch.outer(p, p)
        for layer in module:
            if not hasattr(layer, "bias"):
                continue
            out = made[id(layer)]
            J = torch.stack([torch.autograd.grad(one, out, retain_graph=True)[0][0] for one in z])
            own = [torch.outer(read[id(layer)][0], read[id(layer)][0]), J.T @ middle @ J]
            sums[id(layer)] = [a + b for a, b in zip(sums.get(id(layer), [0 * t for t in own]), own, strict=True)]
            for q in (layer.weight, layer.bias):
                K = torch.stack([torch.autograd.grad(one, q, retain_graph=True)[0].flatten() for one in z])
                gains[id(q)] += torch.diag(K.T @ middle @ K).reshape(q.shape)
    for handle in handles:
        handle.remove()
    blocks = []
    for layer in module:
        if isinstance(layer, nn.LayerNorm):
            blocks += [torch.diag(gains[id(layer.weight)]), sums[id(layer)][1]]
        elif hasattr(layer, "bias"):
            A, G = sums[id(layer)]
            A = A / len(x)
            blocks += [torch.kron(G, A) if isinstance(layer, nn.Linear) else torch.kron(A, G), G]
    return blocks


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
    reference = kfac_by_autograd(module, x, y, likelihood)
    for ours, expected in zip(total.blocks(), reference, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    z = module(x).detach()
    loss = nn.functional.cross_entropy(z, y, reduction="sum") if likelihood == "classification" else 0.5 * (z - y).square().sum()
    torch.testing.assert_close(sum(value for value, _ in results), loss)


def test_labels_that_do_not_count_are_refused_in_one_of_several_batches() -> None:
    module, x, y = case("classification")
    y[3] = -100
    with stand_in(module, "classification") as backend, pytest.raises(hk.InputError, match="labels of -100"):
        backend.kron(x[:10], y[:10], 30)
