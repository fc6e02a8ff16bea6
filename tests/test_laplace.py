"""laplace-torch on hessiankit's matrices against its own backends and against the matrix inverted here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hessiankit as hk

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")


def case(likelihood: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
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


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_covariances_are_those_of_laplace_torchs_own_backend(likelihood: str, structure: str, weights: str) -> None:
    from laplace.curvature import CurvlinopsGGN

    from hessiankit.approximating.laplace_backend import HessiankitGGN

    found, x = fitted(HessiankitGGN, likelihood, structure, weights, 30)
    known, _ = fitted(CurvlinopsGGN, likelihood, structure, weights, 30)
    torch.testing.assert_close(found.loss, known.loss)
    for ours, theirs in zip(found(x[:4]), known(x[:4]), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_batches_add_up_to_the_whole_and_norms_have_their_diagonal() -> None:
    from hessiankit.approximating.laplace_backend import HessiankitGGN

    one, _ = fitted(HessiankitGGN, "classification", "full", "all", 30)
    two, _ = fitted(HessiankitGGN, "classification", "full", "all", 12)
    torch.testing.assert_close(one.H, two.H, rtol=1e-12, atol=1e-14)
    module, x, y = case("classification")
    module = nn.Sequential(module[0], nn.LayerNorm(4).double(), module[2])
    loss, kron = HessiankitGGN(module, "classification").kron(x, y, len(x))
    G = hk.hessian_operator(module, x, y, loss="cross_entropy", kind="ggn", reduction="sum")
    torch.testing.assert_close(kron.to_matrix(), G.approximation("kfac").to_matrix())
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(module(x), y, reduction="sum").detach())
