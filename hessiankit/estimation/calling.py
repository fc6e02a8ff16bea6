"""How a model is put into evaluation mode, called, and read: its logits, and an error that says what did not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.errors import HessiankitError, InputError
from hessiankit.estimation.batches import MicroBatch
from hessiankit.request.calling import arguments, map_tensors, named_tensors
from hessiankit.request.validation import check_module
from hessiankit.torch_state import ordinary_path


@contextmanager
def evaluating(model: nn.Module, who: str = "sharpness") -> Iterator[None]:
    """Put a model into evaluation mode, and every submodule back into its own mode afterwards.

    Raises:
        InputError: If the model is no ``nn.Module``, or compiled or quantised.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{who}: expected a torch.nn.Module, got {type(model).__name__}")
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        check_module(who, model)
        with ordinary_path():
            yield
    finally:
        for module, mode in before:
            module.training = mode


def forward(model: nn.Module, batch: MicroBatch, who: str = "sharpness") -> Tensor:
    """Return the model's logits for a micro-batch, with their graph.

    Raises:
        InputError: If the model does not accept the inputs, or returns no logits.
    """
    return output_of(who, call(who, model, batch.inputs))


def call(who: str, model: nn.Module, inputs: Any) -> Any:
    """Return what a model returns for some inputs.

    Raises:
        InputError: If the model does not accept them.
    """
    tree = dict(inputs) if isinstance(inputs, Mapping) else inputs
    positional, keywords = arguments(map_tensors(lambda x: x.clone() if x.is_inference() else x, tree))
    try:
        return model(*positional, **keywords)
    except (HessiankitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named_tensors(inputs)) or "these inputs"
        raise InputError(f"{who}: the model does not accept {shown}: {first}") from error


def output_of(who: str, outputs: Any) -> Tensor:
    """Return the tensor of logits that a model returned: itself, ``.logits``, entry ``"logits"``, or the first of a tuple.

    Raises:
        InputError: If there is none.

    >>> output_of("example", (torch.ones(1), "cache"))
    tensor([1.])
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor) and not hasattr(outputs, "logits"):
        return outputs[0]
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise InputError(
        f"{who}: the model returned {type(outputs).__name__}; expected a tensor of logits, an object with .logits, or a tuple"
        " that begins with them"
    )
