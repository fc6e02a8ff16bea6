"""Change of loss and accuracy with one block replaced by the identity, without any fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from hessiankit.diagnostics.depth.blocks import Blocks, hooks, state_of
from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.files import WithDict


@dataclass(frozen=True)
class PruningDrop(WithDict):
    """Loss and accuracy with block l removed, less those of the whole model (The Curse of Depth, Fig. 2; no formula there).

    Attributes:
        loss: Of the whole model.
        accuracy: Of the whole model, the share of counted labels with the largest logit; None for squared error.
        loss_change: L numbers; positive where removing the block does damage.
        accuracy_change: L numbers; negative where it does damage. None for squared error.
    """

    loss: float
    accuracy: float | None
    loss_change: tuple[float, ...]
    accuracy_change: tuple[float, ...] | None


def pruning_drop(data: BatchedLoss, blocks: Blocks, *, tell: Callable[[int, int], None]) -> PruningDrop:
    """Return the change of loss and accuracy with each block removed.

    Every block keeps its layer-dependent factor (LayerNorm Scaling's 1 / sqrt(l)). The authors' script instead deletes a
    block and reloads the model, which gives every later block the factor of the layer before.
    """
    loss, accuracy = data.evaluate()
    losses, accuracies = [], []
    for k, block in enumerate(blocks.modules):
        tell(k, len(blocks))
        with removed(block):
            less, right = data.evaluate()
        losses.append(less - loss)
        if accuracy is not None and right is not None:
            accuracies.append(right - accuracy)
    return PruningDrop(loss, accuracy, tuple(losses), None if accuracy is None else tuple(accuracies))


@contextmanager
def removed(block: nn.Module) -> Iterator[None]:
    """Replace a block by the identity on its hidden state; further outputs stay."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = state_of(args, kwargs)[1]
        return type(output)((x, *output[1:])) if type(output) in (tuple, list) else x

    with hooks([block], after=hook):
        yield
