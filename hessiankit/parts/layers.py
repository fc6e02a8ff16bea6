"""The model's blocks: which module lies in which, and what comes before and after them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hessiankit.parts.attention import AttentionUnit
from hessiankit.parts.finding import below, within
from hessiankit.parts.kinds import is_linear


@dataclass(frozen=True)
class Layers:
    """The paths of a model's blocks, numbered over all its stacks in order: an encoder's first, then the decoder's."""

    paths: tuple[str, ...]
    order: dict[str, int]  # place of every module in named_modules()

    def index(self, path: str) -> int | None:
        """Return the block's number that a module lies in, or None.

        >>> Layers(("h.0", "h.1"), {}).index("h.1.mlp")
        1
        """
        return next((k for k, block in enumerate(self.paths) if within(path, block)), None)

    def is_before(self, path: str) -> bool:
        """Tell whether a module is made before the first block."""
        return bool(self.paths) and self.order[path] < self.order[self.paths[0]]

    def is_after(self, path: str) -> bool:
        """Tell whether a module is made after the last block."""
        return bool(self.paths) and self.order[path] > self.order[self.paths[-1]] and self.index(path) is None

    def is_final(self, path: str) -> bool:
        """Tell whether a norm outside the blocks follows a stack of them: by its place, or by its name where it is made before.

        >>> layers = Layers(("h.0",), {"ln_0": 0, "ln_f": 1, "h.0": 2, "norm": 3})
        >>> [layers.is_final(path) for path in ("ln_0", "ln_f", "norm")]
        [False, True, True]
        """
        if not self.paths or self.index(path) is not None:
            return False
        parent, _, leaf = path.rpartition(".")
        mine = [self.order[block] for block in self.paths if within(block, parent)]
        ends_stack = bool(mine) and max(mine) < self.order[path]
        return self.is_after(path) or ends_stack or "final" in leaf or leaf.endswith("_f")


def find_layers(model: nn.Module, units: list[AttentionUnit]) -> Layers:
    """Return the blocks of a model.

    A block is an element of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` that holds an attention and a linear
    map outside it; of nested ones the innermost. Where no element does, one that holds an attention; where a model is a block
    by itself, or there is no attention, there are none.
    """
    order = {path: k for k, (path, _) in enumerate(model.named_modules())}
    for complete in (True, False):
        found: list[str] = []
        for path, module in model.named_modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
                continue
            elements = {below(path, name): element for name, element in module.named_children()}
            blocks = [at for at, element in elements.items() if _is_block(at, element, units, complete)]
            if blocks:
                rows = isinstance(module, nn.ModuleList)  # also those without attention, in a model that mixes kinds
                found = [at for at in found if not within(path, at)]
                found += [at for at in (elements if rows else blocks) if next(elements[at].parameters(), None) is not None]
        if found:
            return Layers(tuple(sorted(found, key=order.__getitem__)), order)
    return Layers((), order)


def _is_block(path: str, module: nn.Module, units: list[AttentionUnit], complete: bool) -> bool:
    inside = [unit for unit in units if within(unit.path, path)]
    if not inside or not complete:
        return bool(inside)
    # what an attention cannot tell for its own lies outside it: the feed-forward layers
    for child, layer in module.named_modules():
        at = below(path, child) if child else path
        outside = not any(within(at, unit.root) for unit in inside)
        if outside and (is_linear(layer) or any(p.ndim >= 2 for p in layer.parameters(recurse=False))):
            return True
    return False
