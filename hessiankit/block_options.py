"""The transformer block that options of the command line describe."""

from __future__ import annotations

import argparse
from typing import Any

from hessiankit.blocks import TransformerBlock
from hessiankit.errors import OutOfMemoryError


def block_of(args: argparse.Namespace, d_model: int, d_ff: int, **more: Any) -> TransformerBlock:
    """Return the float64 block that the options describe.

    Raises:
        InputError: If a name is not known, or sizes do not go together.
        OutOfMemoryError: If the host cannot hold the parameters.
    """
    try:
        return _block(args, d_model, d_ff, **more)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).replace("use smaller sizes", "pass a smaller --d-model or --d-ff")) from error


def _block(args: argparse.Namespace, d_model: int, d_ff: int, **more: Any) -> TransformerBlock:
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
