"""The options of the command line that describe a transformer block."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from hessiankit.blocks import TransformerBlock


def add_block_options(add: Callable[..., Any]) -> None:
    """Add the options of a block: placement, norm, activation, heads, biases, mask, positions, depth."""
    add("--placement", default="post", help="where the norms stand: post (default), pre, hybridnorm, deepnorm, ...")
    add("--norm", default="layernorm", help="layernorm (default) or rmsnorm")
    add("--activation", default="relu", help="relu (default), gelu, gelu_tanh, silu, tanh, leaky_relu, identity, swiglu")
    add("--heads", type=positive, default=1, help="heads of queries (default 1)")
    add("--kv-heads", type=positive, help="heads of keys and values (default: as many)")
    add("--bias", action="store_true", help="biases in the attention and the network")
    add("--causal", action="store_true", help="a token attends to itself and earlier tokens")
    add("--rotary", action="store_true", help="rotary positions")
    add("--layer", type=positive, default=1, help="number of the block in its stack, from 1 (default 1)")
    add("--layers", type=positive, help="blocks in the stack (default: as many as --layer)")


def block_of(args: argparse.Namespace, d_model: int, d_ff: int, **more: Any) -> TransformerBlock:
    """Return the float64 block that the options describe.

    Raises:
        InputError: If a name is not known, or sizes do not fit.
    """
    return TransformerBlock(
        d_model,
        d_ff,
        args.heads,
        args.placement,
        args.norm,
        args.activation,
        args.bias,
        n_kv_heads=args.kv_heads,
        attention_bias=args.bias,
        causal=args.causal,
        rotary=args.rotary,
        layer=args.layer,
        n_layers=args.layer if args.layers is None else args.layers,
        **more,
    ).double()


def positive(text: str) -> int:
    """Return a positive integer, or raise what argparse expects.

    >>> positive("3")
    3
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
