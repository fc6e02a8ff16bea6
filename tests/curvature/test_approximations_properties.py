"""Kronecker factors and optimizers' moments of generated networks and batches, by the gradients of single samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_cases import EXACT, error
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.operator import hessian_operator

IGNORED = -100
PARTIAL_TRACES = (("ijkj", "ik"), ("ijil", "jl"))


class RowsTimesMatrix(nn.Module):
    """x W + b with W stored as (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def network(layers: list[tuple[bool, int]], outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    width, parts = 3, []
    for is_stored_across, size in layers:
        parts += [RowsTimesMatrix(width, size) if is_stored_across else nn.Linear(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*parts, nn.Linear(width, outputs)).double()


def kron(factors: Sequence[Tensor]) -> Tensor:
    return torch.kron(*factors) if len(factors) == 2 else factors[0]


def of_rows(loss: str, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Gradients in the rows of outputs (R, C), their second derivatives (R, C, C), and the number of terms of the mean."""
    if loss == "mse":
        return 2 * (z - y), 2 * torch.eye(z.shape[-1]).to(z).expand(len(z), -1, -1), float(z.numel())
    p = torch.softmax(z, -1)
    counted = (y != IGNORED).to(z)
    slopes = (p - F.one_hot(y.clamp(min=0), z.shape[-1])) * counted[:, None]
    return slopes, (torch.diag_embed(p) - p[:, :, None] * p[:, None]) * counted[:, None, None], float(counted.sum())


def pulled(module: nn.Sequential, x: Tensor) -> tuple[list[tuple[nn.Module, Tensor, Tensor]], Tensor]:
    """Inputs (R, i) of every layer and Jacobians (R, C, o) of the outputs, row by row; and the outputs."""
    layers, held = [m for m in module if hasattr(m, "weight")], []
    handles = [m.register_forward_hook(lambda m, inputs, out: held.append((m, inputs[0].detach(), out))) for m in layers]
    z = module(x)
    for handle in handles:
        handle.remove()
    found = []
    for layer, inputs, out in held:
        J = torch.stack([torch.autograd.grad(z[..., c].sum(), out, retain_graph=True)[0] for c in range(z.shape[-1])], -2)
        found.append((layer, inputs.flatten(0, -2), J.flatten(0, -3)))  # rows do not depend on each other
    return found, z.detach().flatten(0, -2)


CASES = given(
    st.sampled_from(["mse", "cross_entropy"]),
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=2),
    st.integers(2, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([(), (2,)]),
    st.sampled_from(["mean", "sum"]),
    st.integers(0, 99),
)


def drawn(loss: str, outputs: int, sizes: list[int], rows: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n, *rows, 3, dtype=torch.float64, generator=generator)
    if loss == "mse":
        y = torch.randn(n, *rows, outputs, dtype=torch.float64, generator=generator)
    else:
        y = torch.randint(outputs, (n, *rows), generator=generator)
        y[torch.rand(y.shape, generator=generator) < 0.2] = IGNORED
        assume(bool((y != IGNORED).any()))
    return x, y, list(zip(x.split(sizes), y.split(sizes), strict=True))


@settings(max_examples=6, deadline=None)
@CASES
def test_factors_are_sums_over_rows_of_all_batches(
    loss: str, layers: list[Any], outputs: int, sizes: list[int], rows: tuple[int, ...], reduction: str, seed: int
) -> None:
    module = network(layers, outputs, seed)
    x, y, batches = drawn(loss, outputs, sizes, rows, seed)
    of_layers, z = pulled(module, x)
    _, second, terms = of_rows(loss, z, y.reshape(len(z), *y.shape[1 + len(rows) :]))
    scale = 1.0 if reduction == "sum" else 1 / terms
    # a sample counts where one of its labels does
    counted = (y != IGNORED).reshape(len(x), -1).any(1).repeat_interleave(len(z) // len(x))
    operator = hessian_operator(module, batches, loss=loss, kind="ggn", reduction=reduction)
    kfac, ekfac = (operator.approximation(name).to_matrix() for name in ("kfac", "ekfac"))
    exact = operator.to_matrix()
    names = {id(p): name for name, p in module.named_parameters()}
    blocks, corrected = [], []
    for layer, inputs, J in of_layers:
        a = inputs[counted]
        A = a.T @ a / len(a)
        G = (scale * torch.einsum("rco,rcd,rdp->op", J, second, J)).contiguous()
        pair = (A, G) if isinstance(layer, RowsTimesMatrix) else (G, A)
        for p, factors in ((layer.weight, pair), (layer.bias, (G,))):
            at = operator.slices[names[id(p)]]
            blocks.append(kron(factors))
            spectra = [torch.linalg.eigh(factor) for factor in factors]
            U = kron([basis.contiguous() for _, basis in spectra])
            is_unique = all(bool((w.diff() > 1e-4 * w.abs().max()).all()) for w, _ in spectra)  # else the basis is a choice
            corrected.append(U @ torch.diag((U.T @ exact[at, at] @ U).diagonal()) @ U.T if is_unique else ekfac[at, at])
    assert error(kfac, torch.block_diag(*blocks)) <= EXACT
    assert error(ekfac, torch.block_diag(*corrected)) <= 1e-9


def sample_gradients(module: nn.Module, loss: str, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    """The gradients of the samples that count, of losses whose mean over these samples is that of all data: (B, P)."""
    terms = float(y.numel()) if loss == "mse" else float((y != IGNORED).sum())
    kept = [n for n in range(len(x)) if loss == "mse" or bool((y[n] != IGNORED).any())]
    found = []
    for n in kept:
        z = module(x[n])
        value = (
            (z - y[n]).square().sum()
            if loss == "mse"
            else F.cross_entropy(z.reshape(-1, z.shape[-1]), y[n].reshape(-1), reduction="sum", ignore_index=IGNORED)
        )
        own = torch.autograd.grad(value, list(module.parameters()))
        found.append(torch.cat([g.flatten() for g in own]) * (len(kept) / terms if reduction == "mean" else len(kept)))
    return torch.stack(found)


@settings(max_examples=6, deadline=None)
@CASES
@pytest.mark.parametrize("minibatch", [1, 3])
def test_moments_of_mini_batches_by_gradients_of_single_samples(
    minibatch: int, loss: str, layers: list[Any], outputs: int, sizes: list[int], rows: tuple[int, ...], reduction: str, seed: int
) -> None:
    module = network(layers, outputs, seed)
    x, y, batches = drawn(loss, outputs, sizes, rows, seed)
    g = sample_gradients(module, loss, x, y, reduction)
    mean = g.mean(0)
    second = g.T @ g / len(g) / minibatch + (1 - 1 / minibatch) * torch.outer(mean, mean)
    of = ["adam", "shampoo", "muon"]
    report = hk.approximations(module, batches, loss=loss, of=of, minibatch=minibatch, reduction=reduction, damping=1.0)
    adam, shampoo, muon = (report[name].operator.to_matrix() for name in of)
    assert error(adam, torch.diag(second.diagonal())) <= EXACT
    start, left_and_right, of_mean = 0, [], []
    for p in module.parameters():
        at = slice(start, start := start + p.numel())
        own = second[at, at]
        if p.ndim < 2:
            left_and_right.append(own @ own)
            of_mean.append(torch.diag(own.diagonal()))
            continue
        m, n = p.shape
        G = mean[at].reshape(m, n)
        left, right = (torch.einsum(f"{indices}->{out}", own.reshape(m, n, m, n)) for indices, out in PARTIAL_TRACES)
        left_and_right.append(torch.kron(left.contiguous(), right.contiguous()))
        of_mean.append(torch.kron(G @ G.T, torch.eye(n).to(G)) if m <= n else torch.kron(torch.eye(m).to(G), G.T @ G))
    assert error(shampoo @ shampoo, torch.block_diag(*left_and_right)) <= 1e-9  # it has the root of each factor
    assert error(muon, torch.block_diag(*of_mean)) <= EXACT


def test_a_condition_number_that_has_converged_is_not_called_a_lower_bound() -> None:
    module = network([(False, 3)], 2, 0)
    _, _, batches = drawn("mse", 2, [6, 5], (), 1)
    own = {"loss": "mse", "against": "ggn", "of": ["diagonal"], "damping": 0.5}
    products, dense = (hk.approximations(module, batches, method=method, **own) for method in ("products", "dense"))
    assert products["diagonal"].measures.condition == pytest.approx(dense["diagonal"].measures.condition, rel=1e-5)
    assert not any("lower bounds" in note for note in products.notes)
