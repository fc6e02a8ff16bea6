"""``TransformerBlock``: attention, feed-forward network and norms, combined by the equation of a placement."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks.attention import THETA, Attention
from hessiankit.blocks.feedforward import FeedForward
from hessiankit.blocks.norms import make_norm
from hessiankit.blocks.placements import ALPHA, Equation, Placement, placement_of, placement_of_layer
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_sizes


class TransformerBlock(nn.Module):
    """One transformer block; by default the post-norm block of Closing the Curvature Gap.

    ``post``: Y = LN(X + F(X)), Z = LN(Y + FFN(Y)).  ``pre``: Y = X + F(LN(X)), Z = Y + FFN(LN(Y)).  All placements, with their
    sources, are in ``hessiankit.blocks.PLACEMENTS``, their equations in ``hessiankit.blocks.placements``.

    Args:
        d_model: Width of a token, d_V in the papers.
        d_ff: Hidden width of the feed-forward network.
        n_heads: Number of attention heads.
        placement: Norm placement, a name in ``PLACEMENTS``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        activation: One of ``relu, leaky_relu, gelu, gelu_tanh, silu, tanh, identity, swiglu``.
        bias: Whether the feed-forward network has b_1 and b_2 (and b_G).
        n_kv_heads: Number of heads of keys and values, a divisor of ``n_heads``; as many by default.
        d_k: Width of a query and a key per head; ``d_model / n_heads`` by default.
        d_v: Width of a value per head; ``d_model / n_heads`` by default.
        attention_bias: Whether queries, keys and values (and W_O) have biases.
        output_projection: Whether W_O follows the heads; by default with more than one head.
        causal: Whether a token attends to itself and earlier tokens only.
        rotary: Whether queries and keys are rotated by their position, half-split as in Hugging Face's Llama.
        rotary_theta: Base of the rotary frequencies.
        norm_scope: Whether the norms of q, k, v, c act on each head (``"head"``, one gain that the heads share) or on all heads
            side by side (``"full"``); by default as the placement has it, ``"full"`` in ``olmo2`` only.
        eps: Added to the variance, inside the root. 0 is allowed: a constant row then gives NaN, which ``hessian`` reports.
        affine: Whether the norms have a gain (and, for LayerNorm, a bias).
        groups: Number of groups of features in the norms of ``group-ln``. The paper gives none; 2 by default.
        layer: Index of this block in its stack, from 1, for placements that depend on depth.
        n_layers: Number of blocks in the stack.
        alpha: The fraction of Post-Norm blocks in ``mix-ln``.
        factor: The number in the equation of the ``lns`` placements and of ``deepnorm``; by default 1 / sqrt(layer) and
            (2 n_layers)^(1/4), DeepNet's alpha for a decoder or an encoder alone.
        scale_init: Initial value of the learnable scales of ``layerscale``, ``skipinit``, ``admin``; by default .1, 1e-5 or
            1e-6 by depth (CaiT), 1 / sqrt(n_layers), and 1 (see :func:`hessiankit.blocks.profile_admin`).

    The layer is a property of the block, not of its place in a list: deleting other blocks does not change it, and
    ``state_dict`` carries it (as ``depth``) where the equation depends on it.

    Shape:
        ``(B, L, d_model)`` or ``(L, d_model)`` to the same.

    Raises:
        InputError: If a name is not known (with the nearest names), or sizes do not divide what they split.

    >>> block = TransformerBlock(d_model=4, d_ff=8)
    >>> block(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    >>> TransformerBlock(d_model=4, d_ff=8, placement="lns", layer=4).factor
    0.5
    """

    norm_1: nn.Module | None
    norm_2: nn.Module | None
    norm_3: nn.Module | None
    norm_4: nn.Module | None

    @checked("TransformerBlock", leave=("eps",))
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int = 1,
        placement: str = "post",
        norm: str = "layernorm",
        activation: str = "relu",
        bias: bool = False,
        *,
        n_kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        attention_bias: bool = False,
        output_projection: bool | None = None,
        causal: bool = False,
        rotary: bool = False,
        rotary_theta: float = THETA,
        norm_scope: str | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        groups: int = 2,
        layer: int = 1,
        n_layers: int = 1,
        alpha: float = ALPHA,
        factor: float | None = None,
        scale_init: float | None = None,
    ) -> None:
        super().__init__()
        requested = placement_of(placement)
        check_sizes("TransformerBlock", layer=layer, n_layers=n_layers)
        if not 0 <= alpha <= 1:
            raise InputError(f"TransformerBlock: alpha={alpha}, expected the fraction of Post-Norm blocks, from 0 to 1")
        self.placement, self.d_model, self.layer, self.n_layers, self.alpha = placement, d_model, layer, n_layers, alpha
        at_layer = self.own_placement
        for option, number, is_used in (
            ("factor", factor, at_layer.factor),
            ("scale_init", scale_init, at_layer.scales),
        ):
            if number is not None and not is_used and requested.rule is None:
                raise InputError(f"TransformerBlock: {option}={number}, and {placement!r} has no such number; drop {option}=")
        self.factor = at_layer.factor(layer, n_layers) if at_layer.factor is not None and factor is None else factor
        self.attention = Attention(
            d_model, n_heads, d_k=d_k, d_v=d_v, n_kv_heads=n_kv_heads, bias=attention_bias,
            output_projection=n_heads > 1 if output_projection is None else output_projection,
            causal=causal, rotary=rotary, rotary_theta=rotary_theta,
            norms=at_layer.attention_norms, norm=norm, norm_scope=norm_scope or at_layer.norm_scope, eps=eps, affine=affine,
        )  # fmt: skip
        make = partial(
            make_norm,
            "TransformerBlock",
            norm,
            d_model,
            eps=eps,
            affine=affine,
            groups=groups if at_layer.grouped else None,
        )
        self.norm_1 = make() if 1 in at_layer.norms else None
        self.feedforward = FeedForward(d_model, d_ff, activation=activation, bias=bias)
        for k in (2, 3, 4):
            setattr(self, f"norm_{k}", make() if k in at_layer.norms else None)
        for scale in at_layer.scales:
            initial = scale.initial(layer, n_layers) if scale_init is None else scale_init
            for k in (1, 2):
                value = torch.full((d_model,) if scale.vector else (), initial)
                self.register_parameter(f"{scale.name}_{k}", nn.Parameter(value))

    @property
    def own_placement(self) -> Placement:
        """The placement of this layer, which differs from ``placement`` where layers differ, as in ``hybridnorm*``."""
        return placement_of_layer(self.placement, self.layer, self.n_layers, self.alpha)

    @property
    def equation(self) -> Equation:
        """The function (block, X) -> Z that ``forward`` evaluates."""
        return self.own_placement.equation

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Map tokens ``(B, L, d_model)`` or ``(L, d_model)`` to the same shape.

        Args:
            x: The tokens.
            key_padding_mask: Booleans ``(B, L)`` or ``(L,)``, True where a token is padding, as in ``nn.MultiheadAttention``.
        """
        return self.equation(self if key_padding_mask is None else _Masked(self, key_padding_mask), x)

    def extra_repr(self) -> str:
        """Return the options shown by ``print(block)``."""
        depth = f", layer {self.layer} of {self.n_layers}" if placement_of(self.placement).depends_on_depth else ""
        layer_name = self.own_placement.name
        return f"placement={self.placement}{depth}{f' ({layer_name})' if layer_name != self.placement else ''}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if placement_of(self.placement).depends_on_depth:
            factor = float("nan") if self.factor is None else self.factor
            destination[prefix + "depth"] = torch.tensor([self.layer, self.n_layers, self.alpha, factor], dtype=torch.float64)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        key = prefix + "depth"
        if not placement_of(self.placement).depends_on_depth:
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        layer, n_layers, alpha, factor = state_dict[key].tolist()
        saved_placement, at_layer = (
            placement_of_layer(self.placement, int(layer), int(n_layers), alpha),
            self.own_placement,
        )
        if (saved_placement.norms, saved_placement.attention_norms) != (at_layer.norms, at_layer.attention_norms):
            error_msgs.append(
                f"{key}: layer {int(layer)} is a {saved_placement.name} block, this one was built as {at_layer.name}"
            )
            return
        self.layer, self.n_layers, self.alpha = int(layer), int(n_layers), alpha
        self.factor = None if self.factor is None else factor


class _Masked:
    """A block as its equation sees it, with an attention that knows which tokens are padding."""

    def __init__(self, block: TransformerBlock, key_padding_mask: Tensor) -> None:
        self.block = block
        self.attention = partial(block.attention, key_padding_mask=key_padding_mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)
