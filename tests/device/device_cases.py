"""Small models with their data and loss, and every public call on one of them, as numbers to compare."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import hessiankit as hk

DEVICE = os.environ.get("HESSIANKIT_DEVICE") or "cuda"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Of a result, relative to its largest entry; float32 of what is differentiated twice."""


class Case(NamedTuple):
    """A module in evaluation mode, what it is called with, and its loss."""

    module: nn.Module
    inputs: Any
    target: Tensor
    loss: Any

    def on(self, device: str) -> Case:
        """Return a copy on a device."""
        inputs, target = tree_map_only(Tensor, lambda x: x.to(device), (self.inputs, self.target))
        return Case(copy.deepcopy(self.module).to(device), inputs, target, self.loss)

    @property
    def data(self) -> tuple[Any, Tensor]:
        """Inputs and target."""
        return self.inputs, self.target


class Tagger(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 3)."""
        return self.head(self.rnn(x)[0][:, -1])


class LanguageModel(nn.Module):
    """An embedding with positions made in forward, one block of ours, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.block = hk.TransformerBlock(8, 12, 2, "pre", causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (N, L, 11)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / 10
        return self.head(self.block(self.embed(tokens) + positions))


class FusedAttention(nn.Module):
    """Attention by torch's own function, which a device fuses below float64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, L, 8)."""
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Return the models by name, on the CPU."""
    torch.manual_seed(0)
    sequence, images, tokens = torch.randn(3, 5, 8), torch.randn(4, 2, 5, 5), torch.randint(11, (2, 6))
    encoder = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    cnn = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(27, 3))
    made = {
        "encoder": Case(encoder, sequence, torch.randn(3, 5, 8), "mse"),
        "attention": Case(FusedAttention(), sequence, torch.randn(3, 5, 8), "mse"),
        "convolutions": Case(cnn, images, torch.randint(3, (4,)), nn.CrossEntropyLoss()),
        "recurrent": Case(Tagger(), torch.randn(3, 4, 4), torch.randint(3, (3,)), "cross_entropy"),
        "language": Case(LanguageModel(), tokens, torch.randint(11, (2, 6)), "cross_entropy"),
    }
    floats = {
        name: tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, case[1:3])
        for name, case in made.items()
    }
    return {name: Case(case.module.to(dtype).eval(), *floats[name], case.loss) for name, case in made.items()}


def product(operator: Any) -> Tensor:
    """Return the products of an operator with two vectors."""
    return operator @ torch.ones(operator.shape[1], 2, dtype=operator.torch_dtype, device=operator.device).cumsum(0)


def solution(case: Case, **options: Any) -> Tensor:
    """Return the solution of a damped Gauss-Newton system."""
    G = hk.hessian_operator(case.module, *case.data, loss=case.loss, kind="ggn")
    return G.solve(torch.ones(G.shape[0], dtype=G.torch_dtype, device=G.device), damping=1.0, **options).x


def momentum(case: Case) -> torch.optim.Optimizer:
    return torch.optim.SGD(case.module.parameters(), lr=0.1, momentum=0.9)


Call = Callable[[Case], Any]
CALLS: dict[str, Call] = {
    "hessian": lambda c: hk.hessian(c.module, *c.data, loss=c.loss).matrix,
    "lazy hessian": lambda c: hk.hessian(c.module, *c.data, loss=c.loss, lazy=True).matrix,
    "gauss_newton": lambda c: hk.hessian(c.module, *c.data, loss=c.loss).outer(),
    "spectral_norm": lambda c: hk.hessian(c.module, *c.data, loss=c.loss).spectral_norm(),
    "hessian_operator": lambda c: product(hk.hessian_operator(c.module, *c.data, loss=c.loss)),
    "recomputation": lambda c: product(hk.hessian_operator(c.module, *c.data, loss=c.loss, recompute="layers")),
    "fisher": lambda c: product(hk.hessian_operator(c.module, *c.data, loss=c.loss, kind="fisher-empirical")),
    "solve": solution,
    "solve by minres": lambda c: solution(c, method="minres"),
    "solve by lsmr": lambda c: solution(c, method="lsmr"),
    "solve with a preconditioner": lambda c: solution(c, preconditioner="diagonal"),
    "jacobian_operator": lambda c: product(hk.jacobian_operator(c.module, c.inputs)),
    "hessian_diagonal": lambda c: hk.hessian_diagonal(c.module, *c.data, loss=c.loss).flat,
    "frobenius_norms": lambda c: hk.frobenius_norms(c.module, *c.data, loss=c.loss).matrix,
    "spectrum in a metric": lambda c: hk.spectrum(c.module, *c.data, loss=c.loss, k=2, preconditioner=momentum(c)).eigenvalues,
    "critical_sharpness": lambda c: (
        hk.critical_sharpness(c.module, *c.data, loss=c.loss, optimizer=momentum(c), by="parameter").curvature
    ),
}


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    """Let torch make new tensors on a device."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
