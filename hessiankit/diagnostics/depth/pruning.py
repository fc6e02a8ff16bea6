"""Change of loss and accuracy with one block replaced by the identity, without any fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from hessiankit.blocks import TransformerBlock
from hessiankit.diagnostics.depth.blocks import WHO, Blocks, hooks, state_of
from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict


@dataclass(frozen=True)
class PruningDrop(WithDict):
    """Loss and accuracy with block l removed, less those of the whole model (The Curse of Depth, Fig. 2; no formula there).

    Attributes:
        loss: Of the whole model.
        accuracy: Of the whole model, the share of counted labels with the largest logit; None for squared error.
        loss_change: L numbers; positive where removing the block does damage.
        accuracy_change: L numbers; negative where it does damage. None for squared error.
        renumbered: Whether the layer numbers of the blocks after the removed one moved down by one.
    """

    loss: float
    accuracy: float | None
    loss_change: tuple[float, ...]
    accuracy_change: tuple[float, ...] | None
    renumbered: bool


def pruning_drop(data: BatchedLoss, blocks: Blocks, *, renumber: bool = False, tell: Callable[[int, int], None]) -> PruningDrop:
    """Return the change of loss and accuracy with each block removed.

    Every block keeps its layer-dependent factor (LayerNorm Scaling's 1 / sqrt(l)). The authors' script instead deletes a
    block and reloads the model, which gives every later block the factor of the layer before: ``renumber=True``.
    """
    own = _layered(blocks) if renumber else []
    loss, accuracy = data.evaluate()
    losses, accuracies = [], []
    for k, block in enumerate(blocks.modules):
        tell(k, len(blocks))
        with removed(block), _renumbered(own, k):
            less, right = data.evaluate()
        losses.append(less - loss)
        if accuracy is not None and right is not None:
            accuracies.append(right - accuracy)
    return PruningDrop(loss, accuracy, tuple(losses), None if accuracy is None else tuple(accuracies), renumber)


@contextmanager
def removed(block: nn.Module) -> Iterator[None]:
    """Replace a block by the identity on its hidden state; further outputs stay."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = state_of(args, kwargs)[1]
        return type(output)((x, *output[1:])) if type(output) in (tuple, list) else x

    with hooks([block], after=hook):
        yield


def _layered(blocks: Blocks) -> list[TransformerBlock]:
    """Return the blocks, each of which knows its number.

    Raises:
        InputError: One does not, or its norms depend on it.
    """
    layered = []
    for name, block in zip(blocks.names, blocks.modules, strict=True):
        if not isinstance(block, TransformerBlock):
            kind = type(block).__name__
            raise InputError(
                f"{WHO}: renumber=True, but {name!r} is a {kind}, whose layer number is not known; leave renumber out"
            )
        if block.own_placement.name != block.placement:
            raise InputError(
                f"{WHO}: renumber=True, but the norms of {block.placement!r} depend on the layer, so that a renumbered block "
                "would need other parameters; leave renumber out"
            )
        layered.append(block)
    return layered


@contextmanager
def _renumbered(blocks: list[TransformerBlock], gone: int) -> Iterator[None]:
    """Give the factors of some blocks the values of a stack without block ``gone``."""
    before = [block.factor for block in blocks]
    try:
        for k, block in enumerate(blocks):
            rule = block.own_placement.factor
            if rule is not None and k != gone:
                block.factor = rule(max(1, block.layer - (k > gone)), max(1, block.n_layers - 1))
        yield
    finally:
        for block, factor in zip(blocks, before, strict=True):
            block.factor = factor
