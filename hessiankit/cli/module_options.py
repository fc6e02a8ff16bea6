"""The module that options of the command line describe, a transformer block or the user's own model, and its inputs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.cli.loading import load_model, one_line, place, text_batch
from hessiankit.cli.text import load_text
from hessiankit.support.errors import InputError, OutOfMemoryError


@dataclass(frozen=True)
class Asked:
    """A model with inputs, target and loss, and a description of them; prints as two lines."""

    model: nn.Module
    inputs: Tensor
    target: Tensor
    loss: str
    dtype: str
    name: str
    data: str

    def __str__(self) -> str:
        return f"{self.name}\n{self.data}; {self.loss}, {self.dtype}"

    def to_dict(self) -> dict[str, str]:
        """Return the words."""
        return {"model": self.name, "data": self.data, "loss": self.loss}


def asked_of(args: argparse.Namespace) -> Asked:
    """Return the model of --model on a text or on drawn inputs, or the block that the options describe on drawn inputs."""
    if args.model is None:
        torch.manual_seed(args.seed)
        d_model = args.d_model or 4
        block = block_of(args, d_model, args.d_ff or 6)
        place(args.command, block, args.device, getattr(torch, args.dtype))
        name = f"TransformerBlock, {args.placement}, {sum(p.numel() for p in block.parameters()):,} parameters"
        return _on_drawn(args, block, name, (args.batch or 1, args.tokens or 4, d_model))
    loaded = load_model(args.model, seed=args.seed, device=args.device, dtype=getattr(torch, args.dtype))
    if args.shape is not None:
        return _on_drawn(args, loaded.model, str(loaded), tuple(size for part in args.shape for size in part))
    text = load_text("stdlib" if args.text is None else args.text)
    batch, tokens = args.batch or 2, args.tokens or 16
    inputs, target = (x.to(args.device) for x in text_batch(loaded, text, batch, tokens, seed=args.seed))
    run_once(args, loaded.model, inputs)  # a model that takes no tokens is refused here
    data = f"{batch} sequences of {tokens} {loaded.tokens}, {text.name}"
    return Asked(loaded.model, inputs, target, "cross_entropy", args.dtype, str(loaded), data)


def block_of(args: argparse.Namespace, d_model: int, d_ff: int) -> TransformerBlock:
    """Return the float64 block that the options describe."""
    layers = args.layer if args.layers is None else args.layers
    options = {name: getattr(args, name) for name in ("placement", "norm", "activation", "bias", "causal", "rotary", "layer")}
    options |= {"attention_bias": args.bias, "affine": not args.no_affine, "n_kv_heads": args.kv_heads, "n_layers": layers}
    try:
        return TransformerBlock(d_model, d_ff, args.heads, **options).double()
    except OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).replace("use smaller sizes", "pass a smaller --d-model or --d-ff")) from error


def _on_drawn(args: argparse.Namespace, model: nn.Module, name: str, shape: tuple[int, ...]) -> Asked:
    """Return a model on standard normal inputs, with a target of the output's shape, or labels."""
    generator = torch.Generator().manual_seed(args.seed)
    words = f"standard normal inputs of shape {' x '.join(map(str, shape))}, seed {args.seed}"
    try:
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        inputs = inputs.to(args.device, getattr(torch, args.dtype))
    except RuntimeError as error:
        raise _does_not_fit(args, shape) from error
    output = run_once(args, model, inputs)
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.ndim == 0:
        kind = type(output).__name__
        raise InputError(f"{args.command}: the model returned {kind} of no shape; expected a tensor of outputs")
    if (args.loss or "mse") == "mse":
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu").to(output)
        return Asked(model, inputs, target, "mse", args.dtype, name, f"{words}; targets likewise")
    labels = torch.randint(output.shape[-1], output.shape[:-1], generator=generator, device="cpu").to(args.device)
    return Asked(model, inputs, labels, "cross_entropy", args.dtype, name, f"{words}; drawn labels")


def run_once(args: argparse.Namespace, model: nn.Module, inputs: Tensor) -> Any:
    """Return the model's outputs for the inputs."""
    shape = tuple(inputs.shape)
    try:
        with torch.no_grad():
            return model(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        why = one_line(error)
        if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in why:
            raise _does_not_fit(args, shape) from error
        if args.model is None or getattr(args, "shape", None) is not None:
            takes = "pass the shape it takes with --shape, or leave it out for tokens of a text"
            raise InputError(f"{args.command}: the model does not take inputs of shape {list(shape)}: {why}; {takes}") from error
        if isinstance(error, InputError):
            raise  # a model of this library says itself what it takes
        takes = "pass the shape of the inputs that it takes with --shape, the number of samples first, e.g. --shape 4,16,32"
        takes = takes if "shape" in args else "name a language model, which does"
        raise InputError(f"{args.command}: --model {args.model} does not take the tokens of a text ({why}); {takes}") from error


def _does_not_fit(args: argparse.Namespace, shape: tuple[int, ...]) -> OutOfMemoryError:
    sizes = "--batch, --tokens or --d-model" if args.model is None else "--batch or --tokens"
    smaller = sizes if args.shape is None else "--shape"
    why = f"inputs of shape {list(shape)} and what the model makes of them do not fit; pass a smaller {smaller}"
    return OutOfMemoryError(f"{args.command}: {why}")
