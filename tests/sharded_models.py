"""Models in parts: tied, with grouped queries, with experts, with fewer rows than ranks, with adapters."""

from __future__ import annotations

from collections.abc import Callable

import peft_cases
import torch
import transformers as hf
from model_zoo import InDouble
from torch import Tensor, nn

from hessiankit.curvature.estimators import ScalarEstimates

LENGTH = 5
SHARES = {2: [3, 2], 4: [2, 0, 1, 2]}
"""Sequences of each rank: uneven, and with four ranks one holds none."""


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "max_position_embeddings": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(**peft_cases.SPECIAL, **sizes, **heads, experts_implementation="eager")
    return hf.MixtralForCausalLM(config).double()


class FewRows(nn.Module):
    """Two maps of two rows each: of four ranks two hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)).double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.stack([tokens.double().sin(), tokens.double().cos()], -1)
        for layer in self.layers:
            x = layer(x).tanh()
        return x @ torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7)


def few_rows() -> nn.Module:
    torch.manual_seed(0)
    return FewRows()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: peft_cases.moved(peft_cases.gpt2()),
    "grouped queries": lambda: InDouble(peft_cases.moved(peft_cases.llama(num_hidden_layers=2))),
    "experts": lambda: InDouble(peft_cases.moved(mixtral())),
    "few rows": few_rows,
    "adapters": lambda: peft_cases.lora(peft_cases.gpt2(), "c_attn", "c_proj"),
}
KINDS = [*((name, "hessian") for name in MODELS), *(("tied", kind) for kind in ("ggn", "fisher-empirical"))]


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, one after the other."""
    return next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def sequences() -> tuple[Tensor, Tensor]:
    """Return the tokens (5, 5), and labels of which some do not count."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(2, 7, (5, LENGTH), generator=generator) for _ in range(2))
    labels[1, 2:] = labels[4, :1] = -100
    return tokens, labels


def share(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's batches."""
    cuts = SHARES[size]
    own = slice(sum(cuts[:rank]), sum(cuts[: rank + 1]))
    tokens, labels = sequences()
    return [(tokens[own], labels[own])] if cuts[rank] else []


PRODUCTS = (6, 60)
"""Products of estimates of trace and norm, few and many."""


def numbers(estimates: ScalarEstimates) -> dict[str, float]:
    """Return the trace, those of the blocks, and the norm, with their half widths."""
    named = {**estimates.traces, "all": estimates.trace, "norm": estimates.frobenius_squared}
    return {f"{name} {key}": getattr(one, key) for name, one in named.items() for key in ("value", "half_width")}


def vector(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    """Return a vector by the names of parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
