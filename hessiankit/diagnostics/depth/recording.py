"""The data of the diagnostics, the hidden states x_1, ..., x_{L+1} of one forward pass, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.diagnostics.depth.blocks import WHO, Blocks, first_tensor, hidden_state, hooks
from hessiankit.diagnostics.sharpness.batches import BatchedLoss, MicroBatch, check_devices, micro_batches
from hessiankit.diagnostics.sharpness.options import LOSSES
from hessiankit.diagnostics.sharpness.probe import CountedGraph, check_cut, placed
from hessiankit.engine.problem.batches import FORMS
from hessiankit.engine.problem.calling import IGNORE_INDEX, arguments, check_module
from hessiankit.engine.problem.task import available_memory, gib
from hessiankit.support.errors import InputError, OutOfMemoryError, check_name
from hessiankit.support.torch_state import ordinary_path, preserved_state


def read_data(model: nn.Module, data: Any, target: Any, loss: str, *, micro_batch: int | None, labelled: bool) -> BatchedLoss:
    """Return data of the forms of :func:`hessiankit.sharpness` as micro-batches; where ``labelled`` is False, without labels
    too.
    """
    check_name(WHO, "loss", loss, LOSSES)
    if target is None and not labelled:
        first = data if isinstance(data, Tensor) else None
        if isinstance(data, Mapping) and data.get("labels") is None:
            first = next((x for x in data.values() if isinstance(x, Tensor) and x.ndim), None)
            if first is None:
                raise InputError(f"{WHO}: the mapping holds no tensor; pass {FORMS}")
        if first is not None:
            target = torch.full((first.shape[0],), IGNORE_INDEX, device=first.device)
    batches = tuple(micro_batches(WHO, data, target, micro_batch=micro_batch, model=model))
    for batch in batches:
        check_devices(WHO, batch, model)
    check_cut(WHO, model, batches)
    return BatchedLoss(WHO, model, tuple(placed(WHO, model, batches)), loss)


def counted_tokens(batch: MicroBatch, state: Tensor) -> Tensor:
    """Return booleans of the shape of a hidden state without its features: True where a token is not padding.

    Read from ``attention_mask`` (1: a token) or ``key_padding_mask`` (True: padding) among the inputs, if it has that shape.
    """
    shape = state.shape[:-1]
    kwargs = arguments(batch.inputs)[1]
    for name, flip in (("attention_mask", False), ("key_padding_mask", True)):
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == shape:
            return ~mask.bool() if flip else mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=state.device)


def last_tokens(counted: Tensor) -> Tensor:
    """Return booleans: True at the last counted token of each sequence; tokens are the last axis.

    >>> last_tokens(torch.tensor([[True, True, False], [True, True, True]]))
    tensor([[False,  True, False],
            [False, False,  True]])
    """
    return counted & (counted.flip(-1).cumsum(-1).flip(-1) == 1)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, attention that has second derivatives, and afterwards everything of the model as it was."""
    with preserved_state(model), ordinary_path(), sdpa_kernel(SDPBackend.MATH):
        check_module(WHO, model)
        yield


class Stream:
    """The input and the output of every block in one forward pass.

    ``inputs[l - 1]`` is x_l and ``outputs[l - 1]`` is y_l = x_{l+1}, before the final norm, which lies behind the last block.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @property
    def states(self) -> list[Tensor]:
        """x_1, ..., x_{L+1}."""
        return [*self.inputs, self.outputs[-1]]


def _state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
    state = hidden_state(args, kwargs)
    assert state is not None
    return state


@contextmanager
def recording(blocks: Blocks, *, leaves: str = "none") -> Iterator[Stream]:
    """Record the stream of the forward passes inside; each one replaces the one before.

    Args:
        blocks: The blocks.
        leaves: Which blocks' inputs are cut off from what comes before and made leaves of autograd: ``"none"``, ``"first"``
            (so that y_L is a function of x_1) or ``"each"`` (so that y_l is a function of x_l alone).
    """
    stream = Stream()
    first = blocks.modules[0]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, x = _state(args, kwargs)
        if module is first:
            stream.inputs.clear()
            stream.outputs.clear()
        cut = leaves == "each" or (leaves == "first" and module is first)
        stream.inputs.append(x.detach().requires_grad_() if cut else x)
        if not cut:
            return None
        if isinstance(key, int):
            return (*args[:key], stream.inputs[-1], *args[key + 1 :]), kwargs
        return args, {**kwargs, key: stream.inputs[-1]}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        y = first_tensor(output)
        assert y is not None
        stream.outputs.append(y)

    with hooks(blocks.modules, before, after):
        yield stream


@contextmanager
def removed(block: nn.Module) -> Iterator[None]:
    """Replace a block by the identity on its hidden state; further outputs stay."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = _state(args, kwargs)[1]
        return type(output)((x, *output[1:])) if type(output) in (tuple, list) else x

    with hooks([block], after=hook):
        yield


def check_finite(stream: Stream, blocks: Blocks) -> None:
    """Raise InputError if a hidden state is not finite, naming the first block that returned it."""
    for k, x in enumerate(stream.states):
        if not bool(torch.isfinite(x).all()):
            where = f"the input of block {blocks.names[0]!r}" if k == 0 else f"the output of block {blocks.names[k - 1]!r}"
            raise InputError(f"{WHO}: {where} is NaN or infinite, expected finite numbers; look for the cause there")


BASIS = 20
"""Vectors that Lanczos keeps."""
SECOND = 3
"""A graph with second derivatives, in graphs of a training step: the forward pass, its derivative, and work space."""


def expected_memory(data: BatchedLoss, blocks: Blocks, quantities: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes that each quantity is expected to hold beside the model: states and graphs of the largest
    micro-batch, which is run once.
    """
    batch = max(data.batches, key=lambda b: len(b.numbers))
    saved = CountedGraph(data.model, keep=False)
    with torch.enable_grad(), recording(blocks) as stream, saved:
        out = data.output(batch)
    x, parameters = stream.inputs[0], [list(block.parameters()) for block in blocks.modules]
    states = (len(blocks) + 1) * x.numel() * (x.element_size() + 8)
    logits, graph = out.numel() * out.element_size(), saved.bytes + out.numel() * out.element_size()
    largest = max((sum(p.numel() for p in block) for block in parameters), default=0)
    weights = sum(p.numel() * p.element_size() for block in parameters for p in block)
    curvature = SECOND * graph + weights + BASIS * largest * x.element_size()
    needed = {
        "variance": states,
        "angles": states,
        "drop": out.numel() * 24,
        "gradient": graph + 2 * logits + 2 * weights,
        "jacobian": 2 * SECOND * graph + BASIS * x.numel() * x.element_size(),
        "hessian": curvature,
        "ggn": curvature,
    }
    needed = {name: size for name, size in needed.items() if name in quantities}
    free = available_memory(x.device)
    for name, size in needed.items():
        if size > free:
            raise OutOfMemoryError(
                f"{WHO}: {name!r} holds about {gib(size)} for {len(batch.numbers)} sequences at once, but only {gib(free)} "
                f"are free on {x.device}; pass a smaller micro_batch=, or leave it out of what="
            )
    return needed
