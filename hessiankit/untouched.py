"""A model and a process as they were: what measuring in the middle of training has to put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, autograd on and no gradients inside; outside, training goes on with the bits it would have had.

    Put back, whatever happens: the random states of Python, NumPy, the CPU and the model's devices; the mode of every
    module; ``.grad`` (the same tensors) and ``requires_grad`` of every parameter; the values of every buffer.

    Args:
        model: The model that is measured.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> before = torch.get_rng_state()
    >>> with untouched(model):
    ...     drawn, training = torch.rand(1), model.training
    >>> bool(torch.equal(before, torch.get_rng_state())), training, model.training
    (True, False, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with random_kept(model), torch.inference_mode(False), torch.enable_grad():
        try:
            model.eval()
            for p, _, _ in parameters:
                p.grad = None
            yield
        finally:
            for p, gradient, wanted in parameters:
                p.grad = gradient
                p.requires_grad_(wanted)
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):  # a copy counts as a change for graphs that hold the buffer
                        buffer.copy_(value)


@contextmanager
def random_kept(model: nn.Module) -> Iterator[RandomStates]:
    """Put back the random states of Python, NumPy, the CPU and the devices that the model lies on."""
    states = RandomStates(model)
    try:
        yield states
    finally:
        states.restore()


class RandomStates:
    """The random states of Python, NumPy, the CPU and the devices that a model lies on, as they were.

    >>> states = RandomStates(nn.Linear(1, 1))
    >>> drawn = torch.rand(1)
    >>> states.drawn_from()
    True
    >>> states.restore()
    >>> states.drawn_from()
    False
    """

    def __init__(self, model: nn.Module) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        devices = {tensor.device for tensor in _tensors(model) if tensor.device.type not in ("cpu", "meta")}
        self._devices = [(_module_of(device), _index(device)) for device in devices]
        self._others = [module.get_rng_state(*index) for module, index in self._devices]

    def drawn_from(self) -> bool:
        """Tell whether a number has been drawn from one of them since."""
        now = np.random.get_state()  # noqa: NPY002
        return (
            random.getstate() != self._python
            or not all(np.array_equal(a, b) for a, b in zip(now, self._numpy, strict=True))
            or not torch.equal(torch.get_rng_state(), self._cpu)
            or not all(
                torch.equal(module.get_rng_state(*index), state)
                for (module, index), state in zip(self._devices, self._others, strict=True)
            )
        )

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._cpu)
        for (module, index), state in zip(self._devices, self._others, strict=True):
            module.set_rng_state(state, *index)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is one of them, and its functions take none
