"""The papers' initialisations: one function a scheme, from a weight's place to the distribution of its entries.

A scheme gives the standard deviation in block l of L with d = d_model. Those that are cut at three standard deviations have
a measured one that is 1.3 % smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks.attention import Attention
from hessiankit.blocks.block import TransformerBlock
from hessiankit.blocks.embeddings import ClassHead, MeanPoolHead, PatchEmbedding, TokenEmbedding, TokenHead
from hessiankit.blocks.feedforward import FeedForward
from hessiankit.blocks.norms import GroupNorm
from hessiankit.support.containers import arguments
from hessiankit.support.errors import InputError, unknown

CUT = 3.0
"""HybridNorm, Table 7, and OLMo: no entry is more than three standard deviations from 0."""
_NORMS = (nn.LayerNorm, nn.RMSNorm, GroupNorm)
_OWNERS = (Attention, FeedForward, PatchEmbedding, TokenEmbedding, TokenHead, MeanPoolHead, ClassHead)


@dataclass(frozen=True)
class WeightPlace:
    """The place of a weight in a model: its letter, its shape, and the layer of its block."""

    letter: str  # "W_Q", "W_E", ...
    rows: int  # its fan-in, except for the rows of an embedding
    columns: int
    layer: int  # from 1; 1 outside the blocks
    n_layers: int
    std: float | None = None  # in place of 1 / sqrt(2.5 d) in ``normal`` and the schemes made from it

    @property
    def d_model(self) -> int:
        """Width of a token."""
        return self.columns if self.letter in ("W_O", "W_2", "W_E", "P") else self.rows

    @property
    def ends_a_branch(self) -> bool:
        """Whether the product with this matrix is added to the residual stream."""
        return self.letter in ("W_O", "W_2")


@dataclass(frozen=True)
class Distribution:
    """A distribution with mean 0: uniform with this ``std``, or normal with it, truncated at ``cut`` standard deviations."""

    std: float
    cut: float | None = None
    uniform: bool = False

    def draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        """Return float64 entries, the same for every dtype and device of the model."""
        entries = torch.empty(shape, dtype=torch.float64, device=None if generator is None else generator.device)
        if self.uniform:
            return entries.uniform_(-math.sqrt(3) * self.std, math.sqrt(3) * self.std, generator=generator)
        if self.cut is None:
            return entries.normal_(0.0, self.std, generator=generator)
        limit = self.cut * self.std
        return nn.init.trunc_normal_(entries, 0.0, self.std, -limit, limit, generator=generator)


def normal(place: WeightPlace) -> Distribution:
    """std = 1 / sqrt(2.5 d) for every matrix, the network's W_2 of fan-in d_ff too (HybridNorm, Sec. 4.4)."""
    return Distribution(1 / math.sqrt(2.5 * place.d_model) if place.std is None else place.std, CUT)


def megatron(place: WeightPlace) -> Distribution:
    """``normal``, the last matrix of a branch divided by sqrt(2 L) (Shoeybi et al. 2020; HybridNorm, Table 7)."""
    return Distribution(normal(place).std / (math.sqrt(2 * place.n_layers) if place.ends_a_branch else 1.0), CUT)


def depth_scaled(place: WeightPlace) -> Distribution:
    """``normal``, the last matrix of a branch divided by sqrt(2 l) (HybridNorm, Sec. 4.4).

    The Curse of Depth does not say which matrices of block l its 1 / sqrt(2 l) scales; see ``ds-init`` for its source.
    """
    return Distribution(normal(place).std / (math.sqrt(2 * place.layer) if place.ends_a_branch else 1.0), CUT)


def olmo(place: WeightPlace) -> Distribution:
    """1 / sqrt(d); the last matrix of a branch 1 / sqrt(2 n l), n = d for W_O, d_ff for W_2 ("mitchell" in OLMo's code)."""
    n = 2 * (place.d_model if place.letter == "W_O" else place.rows) * place.layer if place.ends_a_branch else place.d_model
    return Distribution(1 / math.sqrt(n), CUT)


def olmo_printed(place: WeightPlace) -> Distribution:
    """1 / sqrt(d); the last matrix of a branch 1 / sqrt(2 d l) (The Curse of Depth, Sec. 5.3)."""
    return Distribution(1 / math.sqrt((2 * place.layer if place.ends_a_branch else 1) * place.d_model), CUT)


def xavier(place: WeightPlace) -> Distribution:
    """Normal with variance 2 / (rows + columns) (Glorot and Bengio 2010); embeddings and positions 1 / d."""
    if place.letter in ("W_E", "P"):
        return Distribution(1 / math.sqrt(place.d_model))
    return Distribution(math.sqrt(2 / (place.rows + place.columns)))


def deepnorm(place: WeightPlace) -> Distribution:
    """``xavier`` with W_V, W_O and the network times (8 L)^(-1/4), for a decoder or an encoder alone (Wang et al. 2022)."""
    is_scaled = place.letter in ("W_V", "W_O", "W_1", "W_G", "W_2")
    return Distribution(xavier(place).std * ((8 * place.n_layers) ** -0.25 if is_scaled else 1.0))


def ds_init(place: WeightPlace) -> Distribution:
    """Xavier's uniform distribution, every matrix of block l divided by sqrt(l) (DS-Init, Zhang et al. 2019)."""
    is_shared = place.letter in ("W_E", "P", "W_C")  # embedding and head
    return Distribution(xavier(place).std / (1.0 if is_shared else math.sqrt(place.layer)), uniform=True)


SCHEMES: dict[str, Callable[[WeightPlace], Distribution]] = {
    "normal": normal,
    "megatron": megatron,
    "scaled": megatron,
    "depth-scaled": depth_scaled,
    "olmo": olmo,
    "mitchell": olmo,
    "olmo-printed": olmo_printed,
    "xavier": xavier,
    "deepnorm": deepnorm,
    "ds-init": ds_init,
}


def initialise(
    module: nn.Module,
    scheme: str = "normal",
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    n_layers: int | None = None,
    std: float | None = None,
    embedding_std: float | None = None,
) -> nn.Module:
    """Draw the weights of hessiankit's own modules anew, in place; biases become 0, gains 1.

    A placement's learnable scales (omega, lambda) are not drawn. The layers are those given to the blocks' constructors.

    Args:
        module: A block, a model or a container of these.
        scheme: A name in ``SCHEMES``, whose formulas are in ``hessiankit.blocks.initialisation``.
        seed: Fixes the weights, whatever dtype and device the module has.
        generator: Generator in place of a seed; by default torch's global one.
        n_layers: Number of blocks L, if it differs from the blocks' own.
        std: Standard deviation in place of 1 / sqrt(2.5 d), such as 0.02, in ``normal``, ``megatron`` and ``depth-scaled``.
        embedding_std: Standard deviation of the embedding and the learned positions, such as 0.02; by default the scheme's.

    Returns:
        The module.

    Raises:
        InputError: If the scheme is not known, both a seed and a generator are given, or a parameter belongs to a module that
            is not hessiankit's; then nothing is drawn.

    >>> block = initialise(TransformerBlock(d_model=10, d_ff=20), "normal", seed=0)  # cut at 3 / sqrt(25)
    >>> bool(block.feedforward.W_2.abs().max() <= 0.6)
    True
    """
    if scheme not in SCHEMES:
        raise unknown("initialise", "scheme", scheme, SCHEMES)
    if seed is not None and generator is not None:
        raise InputError("initialise: both seed and generator are given; pass one of them")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for owner, letter, p, layer, depth in list(_parameters(module)):
            if isinstance(owner, _NORMS):
                p.fill_(float(letter == "weight"))
            elif letter.startswith("b_"):
                p.zero_()
            else:
                rows, columns = p.shape
                distribution = SCHEMES[scheme](WeightPlace(letter, rows, columns, layer, n_layers or depth, std))
                if letter in ("W_E", "P") and embedding_std is not None:
                    distribution = Distribution(embedding_std, distribution.cut, distribution.uniform)
                p.copy_(distribution.draw(p.shape, generator))
    return module


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, int, int]]:
    """Every weight, bias and gain once, with its owner, its letter, and the layer and depth of its block."""
    blocks = {prefix: m for prefix, m in module.named_modules() if isinstance(m, TransformerBlock)}
    depth = max((block.n_layers for block in blocks.values()), default=1)
    ids = set[int]()
    for prefix, owner in module.named_modules():
        block_of_p = next((block for name, block in blocks.items() if not name or f"{prefix}.".startswith(f"{name}.")), None)
        for letter, p in owner.named_parameters(recurse=False):
            if id(p) in ids:
                continue
            if not isinstance(owner, (*_OWNERS, *_NORMS, TransformerBlock)):
                raise InputError(
                    f"initialise: {f'{prefix}.{letter}'.lstrip('.')!r} belongs to a {type(owner).__name__}, whose place in a "
                    "transformer is not known; initialise hessiankit's own modules, and this one yourself"
                )
            ids.add(id(p))
            if not isinstance(owner, TransformerBlock):
                yield owner, letter, p, block_of_p.layer if block_of_p else 1, block_of_p.n_layers if block_of_p else depth


def profile_admin(model: nn.Module, inputs: Any) -> list[float]:
    """Set omega_1 and omega_2 of every ``admin`` block from one forward pass, and return them in the order of the sub-layers.

    The i-th sub-layer x -> N(omega_i x + f_i(x)), attention and network counted alike, gets

        omega_i = sqrt(1 + sum_{j<i} Var f_j) ,

    the 1 being the variance of a normalised embedding, and Var f_j the variance of all entries of what branch j returns in a
    pass with every omega at 1. omega then has equal entries, each learnable.

    Args:
        model: A model or a block with ``placement="admin"``.
        inputs: A representative batch: what the model takes, a tuple of it, or a dict of keywords.

    Raises:
        InputError: If the model has no such block.

    >>> block = TransformerBlock(d_model=4, d_ff=8, placement="admin")
    >>> first, second = profile_admin(block, torch.randn(2, 3, 4))
    >>> first, bool(second > 1)
    (1.0, True)
    """
    blocks = [m for m in model.modules() if isinstance(m, TransformerBlock) and hasattr(m, "omega_1")]
    if not blocks:
        raise InputError(
            f"profile_admin: the {type(model).__name__} has no block with placement='admin'; build it with that placement"
        )
    variances: list[float] = []
    branches = [branch for block in blocks for branch in (block.attention, block.feedforward)]
    omegas = [getattr(block, f"omega_{k}") for block in blocks for k in (1, 2)]
    hooks = [
        branch.register_forward_hook(lambda _, __, out: variances.append(float(out.var(correction=0)))) for branch in branches
    ]
    try:
        with torch.no_grad():
            for omega in omegas:
                omega.fill_(1.0)
            positional, keywords = arguments(inputs)
            model(*positional, **keywords)
            total, values = 1.0, []
            for omega, variance in zip(omegas, variances, strict=True):
                values.append(total**0.5)
                omega.fill_(values[-1])
                total += variance
    finally:
        for hook in hooks:
            hook.remove()
    return values
