"""The stream of hidden states x_1, ..., x_{L+1} of one forward pass, by hooks that are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.depth.blocks import WHO, Blocks, first_tensor, hidden_state
from hessiankit.errors import InputError


@dataclass
class Recording:
    """What one forward pass left: the input and the output of every block.

    ``inputs[l - 1]`` is x_l and ``outputs[l - 1]`` is y_l = x_{l+1}, before the final norm, which lies behind the last block.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def stream(self) -> list[Tensor]:
        """x_1, ..., x_{L+1}."""
        return [*self.inputs, self.outputs[-1]]


@contextmanager
def recording(blocks: Blocks, *, leaves: str = "none") -> Iterator[Recording]:
    """Record the stream of the forward passes inside; each one replaces the one before.

    Args:
        blocks: The blocks.
        leaves: Which blocks' inputs are cut off from what comes before and made leaves of autograd: ``"none"``, ``"first"``
            (so that y_L is a function of x_1) or ``"each"`` (so that y_l is a function of x_l alone).
    """
    found = Recording()
    first = blocks.modules[0]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = hidden_state(args, kwargs)
        assert state is not None
        key, x = state
        if module is first:
            found.inputs.clear()
            found.outputs.clear()
        cut = leaves == "each" or (leaves == "first" and module is first)
        if cut:
            x = x.detach().requires_grad_()
        found.inputs.append(x)
        if not cut:
            return None
        if isinstance(key, int):
            return (*args[:key], x, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: x}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        y = first_tensor(output)
        assert y is not None
        found.outputs.append(y)

    handles = []
    try:
        for block in blocks.modules:
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(block.register_forward_hook(after))
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def removed(block: nn.Module) -> Iterator[None]:
    """Let a block return what it is given: the identity in its place. What else it returns stays."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        state = hidden_state(args, kwargs)
        assert state is not None
        if isinstance(output, tuple):
            return (state[1], *output[1:])
        return [state[1], *output[1:]] if isinstance(output, list) else state[1]

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def check_finite(found: Recording, blocks: Blocks) -> None:
    """Raise InputError if a hidden state is not finite, naming the first block that returned it."""
    for k, x in enumerate(found.stream):
        if not bool(torch.isfinite(x).all()):
            where = f"what goes into block {blocks.names[0]!r}" if k == 0 else f"what block {blocks.names[k - 1]!r} returns"
            raise InputError(f"{WHO}: {where} is NaN or infinite, expected numbers; look for the cause there")
