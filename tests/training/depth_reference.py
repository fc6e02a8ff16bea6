"""What the tests of the depth diagnostics share: small models, and references that know nothing of hooks or probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hessiankit as hk

VOCABULARY = 7


def tokens(*shape: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def language_model(n_layers: int = 3, placement: str = "pre", *, seed: int = 0, **options: Any) -> hk.Transformer:
    """A small causal model in double precision whose gains are not 1."""
    settings: dict[str, Any] = {"norm": "rmsnorm", "activation": "gelu", "causal": True, "rotary": True, "n_heads": 2} | options
    model = hk.Transformer(VOCABULARY, settings.pop("d_model", 4), settings.pop("d_ff", 5), n_layers, placement=placement,
                           seed=seed, **settings).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def stream_of(model: hk.Transformer, ids: Tensor) -> list[Tensor]:
    """x_1, ..., x_{L+1}, by calling the blocks one by one."""
    with torch.no_grad():
        found = [model.embedding(ids)]
        for block in model.blocks:
            found.append(block(found[-1]))
    return found


def dense_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """dy/dx as a matrix, one row of reverse differentiation each."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    return torch.stack([torch.autograd.grad(e, x, retain_graph=True)[0].reshape(-1) for e in y.reshape(-1)])


def gradient_of(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """The gradient of a number as one vector, 0 for parameters that it does not depend on."""
    found = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([g.reshape(-1) for g in found])


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a measurement has to leave alone."""
    return {
        "values": {name: x.detach().clone() for name, x in model.state_dict().items()},
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "wanted": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "factors": [getattr(m, "factor", None) for m in model.modules()],
        "random": torch.get_rng_state().tolist(),
    }


def assert_same_state(before: dict[str, Any], model: nn.Module) -> None:
    after = state_of(model)
    for name, x in before["values"].items():
        assert torch.equal(x, after["values"][name]), name
    for key in ("modes", "hooks", "wanted", "factors", "random"):
        assert before[key] == after[key], key
    for old, new in zip(before["gradients"], after["gradients"], strict=True):
        assert old is new
