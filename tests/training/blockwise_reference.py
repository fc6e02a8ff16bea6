"""What the tests of blockwise learning rates share: a model with a fused tensor, the same one with split leaves, and Lion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

EQ_5 = {"QK": 8.0, "VO": 4.0, "FFN": 6.0, "Norm": 1.0}
TYPE = {
    "self_attn.out_proj.weight": "VO",
    "linear1.weight": "FFN",
    "linear2.weight": "FFN",
    "norm1.weight": "Norm",
    "norm2.weight": "Norm",
}
D = 4


def encoder(seed: int = 0) -> nn.Module:
    """A block of torch's own, whose query, key and value are rows of one tensor."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False)
    return layer.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2, 3, D, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def with_gradients(model: nn.Module) -> nn.Module:
    """The model with gradients of ones."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, after: Callable[[], Any] | None = None, *, first: int = 0
) -> None:
    """Take the steps ``first`` to ``steps``, each on the batch of its number."""
    for step in range(first, steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if after is not None:
            after()


class Split(nn.Module):
    """The same function with query, key and value as parameters of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shell = [model]  # in a list, so that its parameters are not this module's
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        fused = values.pop("self_attn.in_proj_weight")
        self.leaves = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(v) for name, v in values.items()})
        self.q, self.k, self.v = (nn.Parameter(part.clone()) for part in fused.split(D))

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.shell[0], self.values(), (x,))

    def values(self) -> dict[str, Tensor]:
        found = {name.replace("/", "."): p for name, p in self.leaves.items()}
        return {**found, "self_attn.in_proj_weight": torch.cat((self.q, self.k, self.v))}

    def groups(self, lr: float, decay: Callable[[str, float], float], ratios: dict[str, float] = EQ_5) -> list[dict[str, Any]]:
        """One group for each leaf, by a table written out above."""
        typed = [(self.q, "QK"), (self.k, "QK"), (self.v, "VO")]
        typed += [(p, TYPE[name.replace("/", ".")]) for name, p in self.leaves.items()]
        return [{"params": [p], "lr": lr * ratios[t], "weight_decay": decay(t, ratios[t])} for p, t in typed]


def difference(model: nn.Module, values: dict[str, Tensor]) -> float:
    """The largest difference of a tensor of the model, over that tensor's largest entry."""
    with torch.no_grad():
        return max(float((p - values[name]).abs().max() / p.abs().max()) for name, p in model.named_parameters())


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., Algorithm 2): the sign of an average, decoupled weight decay."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(first * m + (1 - first) * p.grad))
                m.mul_(second).add_(p.grad, alpha=1 - second)
        return loss
