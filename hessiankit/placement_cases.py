"""The grid of norm placements: its cases, and for each a tiny language model at a generic point."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import PLACEMENTS, FeedForward, GroupNorm, Transformer
from hessiankit.blocks.placements import placement_of
from hessiankit.errors import InputError
from hessiankit.verify.problem import labelled_cross_entropy, mean_square

OPTIONS: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("relu", "gelu", "swiglu"),
    "heads": ("1", "4", "4/2"),
    "mask": ("none", "causal"),
    "blocks": (1, 3),
    "loss": ("mse", "cross_entropy"),
}
"""What every placement is combined with; heads ``4/2`` are four heads on two of keys and values."""

VOCABULARY, LENGTH, D_MODEL, D_FF, HEAD = 5, 3, 6, 5, 3
"""Head and half a row are three wide: LayerNorm of two numbers is a sign, without curvature but for eps."""

EPS = 0.1
"""Large enough that a formula without it, or with it outside the root, would be far off."""

KINK = 1e-3
"""A pre-activation of a ReLU has to be this far from zero."""

FLAT = 1e-3
"""The mean square (LayerNorm: variance) of a row under a norm has to be above this."""

SMALL = 1e-3
"""No gradient is smaller than this share of the largest: one part in 1e10 of its blocks is then above rounding."""


@dataclass(frozen=True)
class Case:
    """One combination: a placement and one value of each of ``OPTIONS``.

    >>> print(Case("hybridnorm", "rmsnorm", "swiglu", "4/2", "causal", 3, "mse"))
    hybridnorm, rmsnorm, swiglu, heads 4/2, mask causal, 3 blocks, mse
    """

    placement: str
    norm: str
    activation: str
    heads: str
    mask: str
    blocks: int
    loss: str

    def __str__(self) -> str:
        blocks = f"{self.blocks} block{'s' if self.blocks > 1 else ''}"
        return f"{self.placement}, {self.norm}, {self.activation}, heads {self.heads}, mask {self.mask}, {blocks}, {self.loss}"


def cases(placements: Iterable[str] | None = None, *, sample: int | None = None, seed: int = 0) -> list[Case]:
    """Return the cases of the grid: all, those of some placements, or a sample that goes round the placements.

    Args:
        placements: Names in ``hessiankit.blocks.PLACEMENTS``; all by default.
        sample: How many cases to draw; the placements take turns, so that each occurs where there are enough.
        seed: Of the sample.

    Raises:
        InputError: If a placement is not known, or the sample is not positive.

    >>> len(cases(["post"])), len(cases(sample=5))
    (144, 5)
    """
    names = list(PLACEMENTS) if placements is None else list(dict.fromkeys(placements))
    for name in names:
        placement_of(name, who="placement_grid")
    own = [[Case(name, *values) for values in product(*OPTIONS.values())] for name in names]
    if sample is None:
        return [case for group in own for case in group]
    if sample < 1:
        raise InputError(f"placement_grid: a sample of {sample} cases; pass 1 or more")
    rng = random.Random(seed)
    turns = zip(*(rng.sample(group, len(group)) for group in own), strict=True)
    return [case for turn in turns for case in turn][:sample]


def build(case: Case) -> tuple[Transformer, Tensor, Tensor]:
    """Return the model of a case with generic parameters, token ids and a target, the same ones every time.

    One block has biases everywhere and learned positions; three have neither, so that they stay cheap. The head is tied to the
    embedding in half of the cases. Parameters are drawn until no ReLU is near its kink, each network has units on and off, and
    no norm meets a row that is nearly constant (see ``KINK``, ``FLAT``).
    """
    alone = case.blocks == 1
    model = Transformer(
        VOCABULARY, D_MODEL, D_FF, case.blocks, int(case.heads[0]), case.placement,
        norm=case.norm, activation=case.activation, n_kv_heads=int(case.heads[-1]), d_k=HEAD, d_v=HEAD, output_projection=True,
        causal=case.mask == "causal", tied=(case.mask == "causal") == alone, eps=EPS, alpha=0.5,
        bias=alone, attention_bias=alone, max_len=LENGTH if alone else None, initialisation=None,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(int(hashlib.sha256(str(case).encode()).hexdigest()[:8], 16))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids = torch.tensor([[3, 0, 1], [2, 4, 3]])
    target = draw((2, LENGTH, VOCABULARY)) if case.loss == "mse" else torch.tensor([[1, 4, 0], [3, 2, 2]])
    for _ in range(100):
        for name, p in model.named_parameters():  # gains and scales around .8, all others around 0
            is_gain = p.ndim < 2 and "bias" not in name and ".b_" not in name
            p.data = 0.8 + 0.3 * draw(tuple(p.shape)) if is_gain else 0.5 * draw(tuple(p.shape))
        if is_generic(model, ids) and is_balanced(model, ids, target, case.loss):
            return model, ids, target
    raise InputError(f"placement_grid: 100 draws of parameters, none of them generic, for {case}; see KINK and FLAT")


@torch.no_grad()
def is_generic(model: nn.Module, ids: Tensor) -> bool:
    """Say whether the point is away from every kink of a ReLU and from every row that a norm cannot resolve."""
    seen: list[bool] = []

    def network(module: FeedForward, args: tuple[Tensor, ...]) -> None:
        before = args[0] @ module.W_1 + (0 if module.b_1 is None else module.b_1)
        both = bool((before > 0).any()) and bool((before < 0).any())
        seen.append(module.activation != "relu" or (both and bool(before.abs().min() > KINK)))

    def norm(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].unflatten(-1, (module.groups, module.size)) if isinstance(module, GroupNorm) else args[0]
        centred = isinstance(module, nn.LayerNorm) or (isinstance(module, GroupNorm) and module.kind == "layernorm")
        seen.append(bool((rows.var(-1, correction=0) if centred else rows.square().mean(-1)).min() > FLAT))

    hooks = [m.register_forward_pre_hook(norm) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm, GroupNorm))]
    hooks += [m.register_forward_pre_hook(network) for m in model.modules() if isinstance(m, FeedForward)]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return all(seen)


def is_balanced(model: nn.Module, ids: Tensor, target: Tensor, loss: str) -> bool:
    """Say whether no parameter's gradient is so small that float64 could not resolve its blocks; a key's bias has none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    outputs = model(ids)
    scalar = mean_square(outputs, target) if loss == "mse" else labelled_cross_entropy(outputs, target)
    sizes = [float(g.abs().max()) for g in torch.autograd.grad(scalar, parameters)]
    zero = ("attention.b_K", "attention.norm_k.bias")
    return min(s for s, n in zip(sizes, names, strict=True) if not n.endswith(zero)) > SMALL * max(sizes)
