"""The module that options of the command line describe, a transformer block or the user's own model, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.cli.loading import load_model, one_line, place, text_batch
from hessiankit.cli.options import BlockOptions, ModelOptions
from hessiankit.cli.text import load_text
from hessiankit.support.errors import InputError, OutOfMemoryError


@dataclass(frozen=True)
class LossProblem:
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


def loss_problem(settings: ModelOptions) -> LossProblem:
    """Return the model of --model on a text or on drawn inputs, or the block that the options describe on drawn inputs."""
    device, dtype = settings.device, getattr(torch, settings.dtype)
    if settings.model is None:
        torch.manual_seed(settings.seed)
        d_model = settings.d_model or 4
        block = block_of(settings.block, d_model, settings.d_ff or 6)
        place("TransformerBlock", block, device, dtype)
        name = (
            f"TransformerBlock, {settings.block.placement or 'post'}, {sum(p.numel() for p in block.parameters()):,} parameters"
        )
        shape = (settings.batch or 1, settings.tokens or 4, d_model)
        return _on_drawn(settings, block, name, shape, "--batch, --tokens or --d-model")
    loaded = load_model(settings.model, seed=settings.seed, device=device, dtype=dtype)
    if settings.shape is not None:
        return _on_drawn(settings, loaded.model, str(loaded), settings.shape, "--shape")
    text = load_text(settings.text or "stdlib")
    batch, tokens = settings.batch or 2, settings.tokens or 16
    inputs, target = (x.to(device) for x in text_batch(loaded, text, batch, tokens, seed=settings.seed))
    remedy = "pass the shape of the inputs that it takes with --shape, the number of samples first, e.g. --shape 4,16,32"
    run_on_text(loaded.model, inputs, settings.model, remedy)
    data = f"{batch} sequences of {tokens} {loaded.tokens}, {text.name}"
    return LossProblem(loaded.model, inputs, target, "cross_entropy", settings.dtype, str(loaded), data)


def block_of(block: BlockOptions, d_model: int, d_ff: int) -> TransformerBlock:
    """Return the float64 block that the options describe."""
    options = {name: getattr(block, name) for name in ("norm", "activation", "bias", "causal", "rotary", "layer")}
    options |= {"placement": block.placement or "post", "n_layers": block.layers or block.layer, "n_kv_heads": block.kv_heads}
    try:
        module = TransformerBlock(d_model, d_ff, block.heads, attention_bias=block.bias, affine=not block.no_affine, **options)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).replace("use smaller sizes", "pass a smaller --d-model or --d-ff")) from error
    return module.double()


def _on_drawn(settings: ModelOptions, model: nn.Module, name: str, shape: tuple[int, ...], smaller: str) -> LossProblem:
    """Return a model on standard normal inputs, with a target of the output's shape, or labels."""
    generator = torch.Generator().manual_seed(settings.seed)
    words = f"standard normal inputs of shape {' x '.join(map(str, shape))}, seed {settings.seed}"
    try:
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        inputs = inputs.to(settings.device, getattr(torch, settings.dtype))
    except RuntimeError as error:
        raise _does_not_fit(shape, smaller) from error
    remedy = "pass the shape it takes with --shape, or leave it out for tokens of a text"
    output = _run_once(model, inputs, f"the model does not take inputs of shape {list(shape)}", remedy, smaller)
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.ndim == 0:
        raise InputError(f"the model returned {type(output).__name__} of no shape; expected a tensor of outputs")
    if (settings.loss or "mse") == "mse":
        target = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu").to(output)
        return LossProblem(model, inputs, target, "mse", settings.dtype, name, f"{words}; targets likewise")
    labels = torch.randint(output.shape[-1], output.shape[:-1], generator=generator, device="cpu").to(settings.device)
    return LossProblem(model, inputs, labels, "cross_entropy", settings.dtype, name, f"{words}; drawn labels")


def run_on_text(model: nn.Module, inputs: Tensor, source: str, remedy: str) -> None:
    """Refuse a model that does not take the tokens of a text."""
    _run_once(model, inputs, f"--model {source} does not take the tokens of a text", remedy, "--batch or --tokens")


def _run_once(model: nn.Module, inputs: Tensor, refusal: str, remedy: str, smaller: str) -> Any:
    """Return the model's outputs for the inputs."""
    try:
        with torch.no_grad():
            return model(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        why = one_line(error)
        if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in why:
            raise _does_not_fit(tuple(inputs.shape), smaller) from error
        if isinstance(error, InputError):
            raise  # a model of this library says itself what it takes
        raise InputError(f"{refusal} ({why}); {remedy}") from error


def _does_not_fit(shape: tuple[int, ...], smaller: str) -> OutOfMemoryError:
    why = f"inputs of shape {list(shape)} and what the model makes of them do not fit; pass a smaller {smaller}"
    return OutOfMemoryError(why)
