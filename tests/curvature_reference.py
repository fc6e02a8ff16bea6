"""What the tests of the engine share: a module from one formula, and Hessians by reverse-over-reverse autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessiankit as hk

Loss = Callable[[Tensor, Tensor], Tensor]
ZERO = 1e-14
"""Blocks whose entries are all below this, relative to the largest of the whole matrix, count as zero on both sides."""


def sample(cases: Iterable[Any], every: int) -> list[Any]:
    """One case in so many for parametrize; the others are run by ``-m exhaustive`` alone."""
    return [
        case if not k % every else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for k, case in enumerate(cases)
    ]


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter to a generic value in float64, gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.double().parameters():
        p.data = 0.6 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (0.4 if p.ndim < 2 else 0.0)
    return module


class Formula(nn.Module):
    """A module whose forward is f(self, *inputs), with parameters of the given shapes and submodules."""

    def __init__(self, f: Callable[..., Any], **parts: tuple[int, ...] | nn.Module) -> None:
        super().__init__()
        self.f = f
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.zeros(part)))
        randomised(self)

    def forward(self, *inputs: Any) -> Any:
        return self.f(self, *inputs)


def mse(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().sum() / z.numel()


def cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not -100 of log sum exp z - z[label]."""
    kept = labels != -100
    rows = z[kept]
    chosen = rows[torch.arange(len(rows)), labels[kept]]
    return ((rows - rows.amax(-1, keepdim=True)).exp().sum(-1).log() + rows.amax(-1) - chosen).sum() / kept.sum()


def reverse_over_reverse(module: nn.Module, inputs: Any, target: Tensor | None, loss: Loss | None, names: Any = None) -> Tensor:
    """The Hessian by torch.autograd.grad twice, one row at a time; attention in plain operations, which have two derivatives."""
    chosen = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters() if names is None or n in names}
    leaves = list(chosen.values())
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        z = torch.func.functional_call(module, chosen, args)
    value = z.sum() if loss is None else loss(z, target)
    return gradient_twice(value, leaves)


def gradient_twice(value: Tensor, leaves: list[Tensor]) -> Tensor:
    """The Hessian of a value with respect to leaves by torch.autograd.grad twice."""
    slopes = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([jacobian_rows(slope, leaves) for slope in slopes])


def jacobian_rows(slope: Tensor, leaves: list[Tensor]) -> Tensor:
    """The derivatives of every entry of a tensor: all rows at once, or one by one where torch.vmap lacks an operation."""
    found: Any = [None] * len(leaves)
    if slope.requires_grad:
        units = torch.eye(slope.numel(), dtype=slope.dtype, device=slope.device).view(-1, *slope.shape)
        try:
            found = torch.autograd.grad(slope, leaves, units, retain_graph=True, is_grads_batched=True, allow_unused=True)
        except (RuntimeError, UserWarning):
            each = [torch.autograd.grad(slope, leaves, unit, retain_graph=True, allow_unused=True) for unit in units]
            found = [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]
    parts = [torch.zeros_like(p).expand(slope.numel(), *p.shape) if x is None else x for x, p in zip(found, leaves, strict=True)]
    return torch.cat([part.reshape(slope.numel(), -1) for part in parts], 1)


EIGHTH_ORDER = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""Weights of g(x + k h) - g(x - k h), k = 1 .. 4, in a first derivative whose error is O(h^8)."""


def by_differences(parameters: Callable[[], Iterable[nn.Parameter]], loss: Callable[[], Tensor], step: float = 5e-3) -> Tensor:
    """The Hessian by differences of the gradient as a user takes it, of a loss of no arguments, with entries moved in place.

    ``parameters`` is a module's method, or makes the module of the loss anew, where a call changes what the next one finds.
    """

    def gradient(k: int, i: int, by: float) -> Tensor:
        leaves = list(parameters())
        entries = leaves[k].data.view(-1)
        before = entries[i].clone()
        entries[i] += by
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            slopes = torch.autograd.grad(loss(), leaves, allow_unused=True, materialize_grads=True)
        entries[i] = before
        return torch.cat([slope.detach().reshape(-1) for slope in slopes])

    def row(k: int, i: int) -> Tensor:
        pairs = enumerate(EIGHTH_ORDER, 1)
        return sum(weight * (gradient(k, i, n * step) - gradient(k, i, -n * step)) for n, weight in pairs) / step  # type: ignore[return-value]

    return torch.stack([row(k, i) for k, p in enumerate(parameters()) for i in range(p.numel())])


def gauss_newton(module: nn.Module, inputs: Any, target: Tensor | None, loss: Loss, names: Any = None) -> Tensor:
    """J^T L'' J, with J and L'' by torch.autograd.functional."""
    chosen = {n: p.detach() for n, p in module.named_parameters() if names is None or n in names}
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(chosen, values, strict=True)), args)

    z = module(*args).detach()
    jacobians = torch.autograd.functional.jacobian(output, tuple(chosen.values()), vectorize=True)
    J = torch.cat([j.reshape(z.numel(), -1) for j in jacobians], 1)
    return J.T @ torch.autograd.functional.hessian(lambda z: loss(z, target), z).reshape(z.numel(), -1) @ J


def largest_error(found: hk.Hessian, expected: Tensor) -> float:
    """Largest difference over all pairs of parameters, relative to the largest entry of the pair's block."""
    whole, worst = float(expected.abs().max()), 0.0
    for i in found.names:
        for j in found.names:
            theirs = expected[found.slices[i], found.slices[j]]
            difference, scale = float((found.block(i, j) - theirs).abs().max()), float(theirs.abs().max())
            if max(difference, scale) > ZERO * whole:
                worst = max(worst, difference / scale if scale else float("inf"))
    return worst


def assert_exact(
    module: nn.Module, inputs: Any, target: Tensor | None = None, *, loss: Any = "mse", tolerance: float = 1e-12, **options: Any
) -> hk.Hessian:
    """Assert that hessian() agrees with reverse-over-reverse in every block; draw a target if there is none."""
    if target is None and loss is not None:
        target = draw(*module(*(inputs if isinstance(inputs, tuple) else (inputs,))).shape, seed=7)
    found = hk.hessian(module, inputs, target, loss=loss, **options)
    reference = {"mse": mse, "cross_entropy": cross_entropy}.get(loss, loss) if isinstance(loss, str) else loss
    error = largest_error(found, reverse_over_reverse(module, inputs, target, reference, found.names))
    assert error <= tolerance, error
    assert torch.equal(found.matrix, found.matrix.T)
    return found


def in_thread(function: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def assert_one_clear_error(call: Callable[[], Any], message: str) -> None:
    """Assert that a call raises an InputError with a message of one line."""
    with pytest.raises(hk.InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
