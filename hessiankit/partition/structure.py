"""What the modules of a model say about its parameters: their types, their attributes and sizes, and where they lie.

Firm are a module's type (a lookup, a norm, nn.MultiheadAttention, hessiankit's own) and a weight's place in an attention;
that what is left of a block is its feed-forward part, and what follows the blocks the head, is an inference, which the flow
of data may correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from hessiankit.engine.problem.selection import parse_part
from hessiankit.partition.attention import AttentionUnit, attention_units, unit_of
from hessiankit.partition.findings import Finding, Owner, below, within
from hessiankit.partition.fused import named_slices
from hessiankit.partition.modules import by_name, is_linear, is_lookup, is_norm, is_scale, own_types


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


_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts", "n_experts")


@dataclass(frozen=True)
class ModelStructure:
    """A model's attentions and blocks, and what its modules say about each parameter, by its name."""

    units: list[AttentionUnit]
    layers: Layers
    findings: dict[str, list[Finding]]

    @property
    def alone(self) -> bool:
        """Whether the model is a block by itself."""
        return not self.layers.paths and bool(self.units)


def structure(model: nn.Module, places: dict[str, list[Owner]]) -> ModelStructure:
    """Return what the modules of a model say about its parameters.

    Args:
        model: Any module.
        places: Its parameters' :func:`~hessiankit.partition.findings.owners`.

    >>> from hessiankit.partition.findings import owners
    >>> layer = nn.TransformerEncoderLayer(4, 2, 6)
    >>> found = structure(layer, owners(layer)).findings
    >>> [(f.type, f.role, f.segments) for f in found["self_attn.in_proj_bias"]][1:]
    [('QK', 'key bias', ((4, 8),)), ('VO', 'value bias', ((8, 12),))]
    """
    units = attention_units(model)
    layers = find_layers(model, units)
    reader = _PlaceReader(model, units, layers)
    findings: dict[str, list[Finding]] = {}
    for name, parameter in model.named_parameters():
        said = [reader.of(owner, parameter) for owner in places[name]]
        findings[name] = _of_ties([found for found in said if found])
    return ModelStructure(units, layers, findings)


def _of_ties(said: list[list[Finding]]) -> list[Finding]:
    """Return what the places of one parameter say together: all of it where they differ, for a policy to choose."""
    if len({f.type for found in said for f in found if f.axis is None}) > 1:
        return [f for found in said for f in found]
    return next((found for found in said if any(f.firm for f in found)), said[0] if said else [])


class _PlaceReader:
    """Reads one place of a parameter at a time."""

    def __init__(self, model: nn.Module, units: list[AttentionUnit], layers: Layers) -> None:
        self.model, self.units, self.layers = model, units, layers
        self.norms = {path for path, module in model.named_modules() if is_norm(module)}
        self.alone = not layers.paths and bool(units)  # the model is a block by itself
        self.head = _output_embedding(model)
        self.width = _width(model, layers)
        self.usual = self._usual()
        self.gated: dict[str, list[Finding]] = {}
        for label, where in named_slices(model).items():
            role, kind = label.split(".")[-2:]
            if role in ("gate", "up"):
                name, index = parse_part(where)
                assert index is not None
                cuts = tuple((cut[-1].start, cut[-1].stop) for cut in index)  # type: ignore[union-attr]
                said = f"{role} bias" if kind == "bias" else role
                reason = f"slice of {name.split('.')[-2]}" if kind in name else "slice of stacked experts"
                self.gated.setdefault(name, []).append(Finding("FFN", said, reason, len(index[0]) - 1, cuts))

    def of(self, owner: Owner, p: Tensor) -> list[Finding]:
        module, kind = owner.module, type(owner.module).__name__
        for leaf, block_type, role in own_types(module):
            if leaf == owner.leaf:
                return [Finding(block_type, role, f"{leaf} of hessiankit's {kind}")]
        if is_lookup(module):
            return [Finding("Emb", _lookup_role(owner), kind)]
        if owner.path in self.norms:
            return [Finding("Norm", "gain" if owner.leaf != "bias" else "norm bias", kind)]
        if is_scale(module):
            return [Finding("Norm", "scale", f"{kind} scales rows by a vector")]
        for unit in self.units:
            if id(p) in unit.roles:
                return unit.roles[id(p)]
        if owner.name in self.gated:
            return self.gated[owner.name]
        if module is self.head:
            return [Finding("Head", _role("head", owner), "get_output_embeddings()")]
        if self.layers.index(owner.path) is not None or self.alone:
            return list(self._in_block(owner, p))
        if self.layers.paths and is_linear(module) and not self._in_other_stack(owner.path):
            block_type, role, where = self._outside(owner)
            return [Finding(block_type, _role(role, owner), f"{kind} {where}", firm=False)]
        return []

    def _outside(self, owner: Owner) -> tuple[str, str, str]:
        """Return type, role and reason of a linear map outside the blocks."""
        out, into, *_ = owner.module.get_parameter("weight").shape
        if self.layers.is_after(owner.path):
            return "Head", "head", "after the blocks"
        if not self.layers.is_before(owner.path):
            return "Other", "map between blocks", "between blocks"
        if into == self.width != out:  # made before the blocks, and called after them
            return "Head", "head", "outside the blocks, from the model's width"
        return "Emb", "input map", "before the blocks"

    def _in_other_stack(self, path: str) -> bool:
        """Tell whether a module lies in one of several of a kind that hold no block: blocks that were not recognised."""
        while path:
            element, path = path, path.rpartition(".")[0]
            above = self.model.get_submodule(path)
            if isinstance(above, (nn.ModuleList, nn.Sequential)) and not any(within(b, element) for b in self.layers.paths):
                kind = type(self.model.get_submodule(element))
                several = sum(type(child) is kind for child in above.children()) > 1
                if several and next(self.model.get_submodule(element).children(), None) is not None:
                    return True
        return False

    def _in_block(self, owner: Owner, p: Tensor) -> Iterator[Finding]:
        if unit_of(owner.path, self.units) is not None:
            return  # attention's own, and none of the roles that are known
        if not self.alone and self._limb(owner.path) not in self.usual:
            return  # a block without an attention that is known, and a part of it that the others do not have: a mixer?
        kind = type(owner.module).__name__
        if is_linear(owner.module) and self._is_router(owner):
            yield Finding("Other", _role("router", owner), f"{kind} with one output for each expert")
        elif not is_linear(owner.module) and (named := by_name(owner)) is not None and named.type != "FFN":
            yield named
        elif is_linear(owner.module) or p.ndim >= 2:
            yield Finding("FFN", _role("feed-forward", owner), f"{kind} of a block, outside its attention", firm=False)

    def _limb(self, path: str) -> tuple[str, str]:
        """Return name and class of the child of a block that a module lies in."""
        index = self.layers.index(path)
        block = self.layers.paths[index] if index is not None else ""
        child = path.removeprefix(f"{block}.").split(".")[0] if path != block else ""
        return child, type(self.model.get_submodule(f"{block}.{child}" if child else block)).__name__

    def _usual(self) -> set[tuple[str, str]]:
        """Return the children of those blocks that hold an attention."""
        found = set()
        for block in self.layers.paths:
            if any(within(unit.path, block) for unit in self.units):
                found |= {self._limb(f"{block}.{child}") for child, _ in self.model.get_submodule(block).named_children()}
                found.add(self._limb(block))
        return found

    def _is_router(self, owner: Owner) -> bool:
        """Tell whether a layer has as many outputs as there are experts beside it, or in the module around."""
        outputs = owner.module.get_parameter("weight").shape[0]
        path = owner.path
        for _ in range(2):
            path = path.rpartition(".")[0]
            for at, module in self.model.get_submodule(path).named_modules(prefix=path):
                if any(getattr(module, name, None) == outputs for name in _EXPERTS):
                    return True
                if isinstance(module, nn.ModuleList) and len(module) == outputs > 1 and not within(owner.path, at):
                    return True
            if path in self.layers.paths:
                break
        return False


def _width(model: nn.Module, layers: Layers) -> int:
    """Return the width of the rows that go through the blocks: the size of the first norm of the first block, or 0."""
    for block in layers.paths[:1]:
        for module in model.get_submodule(block).modules():
            if is_norm(module):
                return next((p.shape[0] for p in module.parameters()), 0)
    return 0


def _role(role: str, owner: Owner) -> str:
    return f"{role} bias" if "bias" in owner.leaf else role


def _lookup_role(owner: Owner) -> str:
    name = owner.path.lower()
    if "rel" in name and ("bias" in name or "pos" in name):
        return "relative position bias"
    last = name.rpartition(".")[2]
    if "pos" in last or last == "wpe":
        return "position embedding"
    return "segment embedding" if "type" in last or "segment" in last else "token embedding"


def _output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the layer that a model of transformers or timm itself calls its head."""
    for name in ("get_output_embeddings", "get_classifier"):
        if callable(ask := getattr(model, name, None)):
            try:
                found = ask()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            if isinstance(found, nn.Module) and is_linear(found):
                return found
    return None
