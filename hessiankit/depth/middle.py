"""The stream between a block's two sub-layers, x'_l, where a block has one that can be recognised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import equations as eq
from hessiankit.depth.blocks import Blocks, first_tensor, hidden_state

_RETURNED_BY: dict[eq.Equation, str] = {
    **dict.fromkeys((eq.post, eq.deepnorm, eq.admin), "norm_1"),
    **dict.fromkeys((eq.post_shifted, eq.bare_post, eq.pre_post), "norm_2"),
}
"""Placements whose Y is what a norm returns; elsewhere a module is given Y."""
_GIVEN_TO: dict[eq.Equation, str] = {eq.branch_post: "feedforward"}
TOLERANCE = 64
"""Roundings of the stream's largest entry that x' may differ from x plus a branch."""


@contextmanager
def recording_middles(blocks: Blocks) -> Iterator[list[Tensor | None]]:
    """Record x'_l of every block in the forward pass inside; the list is filled when the block returns.

    In hessiankit's blocks x' is Y of ``hessiankit.blocks.equations``. In others it is what a child is given, if that is the
    block's input plus what an earlier child returned: the stream after the attention's residual sum. None where neither is.
    """
    found: list[Tensor | None] = []
    handles: list[Any] = []
    try:
        for block in blocks.modules:
            watcher = _Watcher(block, found)
            handles += watcher.handles
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Watcher:
    """Watches the children of one block during its call."""

    def __init__(self, block: nn.Module, found: list[Tensor | None]) -> None:
        self.block, self.found = block, found
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}
        self.sums: list[Tensor] = []
        self.x: Tensor | None = None
        self.handles = [
            block.register_forward_pre_hook(self._start, with_kwargs=True),
            block.register_forward_hook(self._end),
        ]
        for name, child in block.named_children():
            self.handles.append(child.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self.handles.append(child.register_forward_hook(self._after(name)))

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = hidden_state(args, kwargs)
        self.x = None if state is None else state[1]
        self.given, self.returned, self.sums = {}, {}, []

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = hidden_state(args, kwargs)
            if state is None or self.x is None or state[1].shape != self.x.shape:
                return
            self.given[name] = state[1]
            if not isinstance(self.block, TransformerBlock) and self._is_sum(state[1]):
                self.sums.append(state[1])

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            y = first_tensor(output)
            if y is not None and self.x is not None and y.shape == self.x.shape:
                self.returned[name] = y

        return hook

    def _is_sum(self, candidate: Tensor) -> bool:
        """Tell whether this is x plus what an earlier child returned."""
        assert self.x is not None
        x = self.x
        allowed = TOLERANCE * torch.finfo(x.dtype).eps * float(candidate.abs().max())
        return any(float((candidate - x - f).abs().max()) <= allowed for f in self.returned.values())

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(self.block, TransformerBlock):
            self.found.append(self._of_placement(self.block))
        else:
            self.found.append(self.sums[0] if self.sums else None)
        self.given, self.returned, self.sums, self.x = {}, {}, [], None

    def _of_placement(self, block: TransformerBlock) -> Tensor | None:
        equation = block.own_placement.equation
        if equation in _RETURNED_BY:
            return self.returned.get(_RETURNED_BY[equation])
        x = self.given.get(_GIVEN_TO.get(equation, "norm_2"))
        if equation is eq.lns_before_ln and x is not None and block.factor:
            return x / block.factor
        return x
