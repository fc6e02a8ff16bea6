"""Findings on parameters from the model's modules: their types, attributes, sizes and places.

The type of a module (a lookup, a norm, nn.MultiheadAttention, hessiankit's own) and the place of a weight in an attention are
certain. That the other layers of a block are its feed-forward part, and that a layer after the blocks is the head, is
inferred; the flow of data may correct it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from hessiankit.training.partition.attention import AttentionUnit, attention_units, fused_findings
from hessiankit.training.partition.findings import Finding, Owner, child_path, is_within
from hessiankit.training.partition.modules import by_name, is_linear, is_lookup, is_norm, is_scale, own_type, untyped_role


@dataclass(frozen=True)
class Layers:
    """The paths of a model's blocks, numbered over all its stacks in order: an encoder's first, then the decoder's."""

    paths: tuple[str, ...]
    order: dict[str, int]  # place of every module in named_modules()

    def index(self, path: str) -> int | None:
        """Return the index of the block that holds a module, or None.

        >>> Layers(("h.0", "h.1"), {}).index("h.1.mlp")
        1
        """
        return next((k for k, block in enumerate(self.paths) if is_within(path, block)), None)

    def is_before(self, path: str) -> bool:
        """Whether a module is registered before the first block."""
        return bool(self.paths) and self.order[path] < self.order[self.paths[0]]

    def is_after(self, path: str) -> bool:
        """Whether a module is registered after the last block."""
        return bool(self.paths) and self.order[path] > self.order[self.paths[-1]] and self.index(path) is None

    def is_final(self, path: str) -> bool:
        """Whether a norm outside the blocks follows a stack of them, by its place, or by its name if registered before.

        >>> layers = Layers(("h.0",), {"ln_0": 0, "ln_f": 1, "h.0": 2, "norm": 3})
        >>> [layers.is_final(path) for path in ("ln_0", "ln_f", "norm")]
        [False, True, True]
        """
        if not self.paths or self.index(path) is not None:
            return False
        parent, _, leaf = path.rpartition(".")
        places = [self.order[block] for block in self.paths if is_within(block, parent)]
        ends_stack = bool(places) and max(places) < self.order[path]
        return self.is_after(path) or ends_stack or "final" in leaf or leaf.endswith("_f")


def find_layers(model: nn.Module, units: list[AttentionUnit]) -> Layers:
    """Return the blocks of a model.

    A block is an element of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` that holds an attention and a linear
    map outside it; of nested ones the innermost. Where no element does, one that holds an attention; where a model is a block
    by itself, or there is no attention, there are none.
    """
    order = {path: k for k, (path, _) in enumerate(model.named_modules())}
    for complete in (True, False):
        layers: list[str] = []
        for path, module in model.named_modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
                continue
            elements = {child_path(path, name): element for name, element in module.named_children()}
            blocks = [at for at, element in elements.items() if _is_block(at, element, units, complete)]
            if blocks:
                rows = isinstance(module, nn.ModuleList)  # also those without attention, in a model that mixes kinds
                layers = [at for at in layers if not is_within(path, at)]
                layers += [at for at in (elements if rows else blocks) if next(elements[at].parameters(), None) is not None]
        if layers:
            return Layers(tuple(sorted(layers, key=order.__getitem__)), order)
    return Layers((), order)


def _is_block(path: str, module: nn.Module, units: list[AttentionUnit], complete: bool) -> bool:
    nested = [unit for unit in units if is_within(unit.path, path)]
    if not nested or not complete:
        return bool(nested)
    # the feed-forward layers lie outside the attention
    rest = [layer for at, layer in module.named_modules(prefix=path) if not any(is_within(at, u.root) for u in nested)]
    return any(is_linear(layer) or any(p.ndim >= 2 for p in layer.parameters(recurse=False)) for layer in rest)


_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts", "n_experts")


def structure(model: nn.Module, places: dict[str, list[Owner]]) -> tuple[Layers, dict[str, list[Finding]]]:
    """Return a model's blocks, and the findings of its modules by parameter name.

    >>> from hessiankit.training.partition.findings import owners
    >>> layer = nn.TransformerEncoderLayer(4, 2, 6)
    >>> _, findings = structure(layer, owners(layer))
    >>> [(f.type, f.role, f.segments) for f in findings["self_attn.in_proj_bias"]][1:]
    [('QK', 'key bias', ((4, 8),)), ('VO', 'value bias', ((8, 12),))]
    """
    slices = fused_findings(model)
    units = attention_units(model, slices)
    layers = find_layers(model, units)
    reader = _PlaceReader(model, units, layers, slices)
    findings: dict[str, list[Finding]] = {}
    for name, parameter in model.named_parameters():
        per_owner = [reader.of(owner, parameter) for owner in places[name]]
        findings[name] = _of_ties([findings_of_owner for findings_of_owner in per_owner if findings_of_owner])
    return layers, findings


def _of_ties(per_owner: list[list[Finding]]) -> list[Finding]:
    """Return the findings of all owners of one parameter: where they differ, all of them: the policy chooses."""
    if len({f.type for findings in per_owner for f in findings if f.axis is None}) > 1:
        return [f for findings in per_owner for f in findings]
    return next((findings for findings in per_owner if any(f.certain for f in findings)), per_owner[0] if per_owner else [])


class _PlaceReader:
    """Findings on a parameter through one of its owners."""

    def __init__(
        self, model: nn.Module, units: list[AttentionUnit], layers: Layers, slices: dict[str, dict[int, list[Finding]]]
    ) -> None:
        self.model, self.units, self.layers = model, units, layers
        self.norms = {path for path, module in model.named_modules() if is_norm(module)}
        roles = {path: untyped_role(module) for path, module in model.named_modules()}
        self.untyped = {path: role for path, role in roles.items() if role is not None}
        self.is_block = not layers.paths and bool(units)  # the model is a block by itself
        self.head = _output_embedding(model)
        self.width = _width(model, layers)
        self.usual = self._usual()
        self.findings = {i: entry for path, roles in slices.items() for i, entry in roles.items() if entry[0].type == "FFN"}
        for unit in reversed(units):  # of nested ones, the outer first
            self.findings |= unit.roles

    def of(self, owner: Owner, p: Tensor) -> list[Finding]:
        module, kind = owner.module, type(owner.module).__name__
        if (hessiankit_type := own_type(owner)) is not None:
            return [Finding(*hessiankit_type, f"{owner.leaf} of hessiankit's {kind}")]
        if is_lookup(module):
            return [Finding("Emb", _lookup_role(owner), kind)]
        if owner.path in self.norms:
            return [Finding("Norm", "gain" if owner.leaf != "bias" else "norm bias", kind)]
        if is_scale(module):
            return [Finding("Norm", "scale", f"{kind} scales rows by a vector")]
        role = next((role for path, role in self.untyped.items() if is_within(owner.path, path)), None)
        if role == "hyper-connection" and p.ndim < 2:
            return [Finding("Norm", "scale", f"vector of {kind}", certain=False)]
        if role is not None:
            return [Finding("Other", _role(role, owner), f"{kind} in {role}")]
        if id(p) in self.findings:
            return self.findings[id(p)]
        if module is self.head:
            return [Finding("Head", _role("head", owner), "get_output_embeddings()")]
        if self.layers.index(owner.path) is not None or self.is_block:
            return list(self._in_block(owner, p))
        if self.layers.paths and is_linear(module) and not self._in_other_stack(owner.path):
            block_type, role, where = self._outside(owner)
            return [Finding(block_type, _role(role, owner), f"{kind} {where}", certain=False)]
        return []

    def _outside(self, owner: Owner) -> tuple[str, str, str]:
        """Return type, role and reason of a linear map outside the blocks."""
        outputs, inputs, *_ = owner.module.get_parameter("weight").shape
        if self.layers.is_after(owner.path):
            return "Head", "head", "after the blocks"
        if not self.layers.is_before(owner.path):
            return "Other", "map between blocks", "between blocks"
        if inputs == self.width != outputs:  # made before the blocks, and called after them
            return "Head", "head", "outside the blocks, from the model's width"
        return "Emb", "input map", "before the blocks"

    def _in_other_stack(self, path: str) -> bool:
        """Whether a module lies in one of several siblings of a class without a recognised block."""
        while path:
            element, path = path, path.rpartition(".")[0]
            parent = self.model.get_submodule(path)
            if isinstance(parent, (nn.ModuleList, nn.Sequential)) and not any(is_within(b, element) for b in self.layers.paths):
                kind = type(self.model.get_submodule(element))
                has_siblings = sum(type(child) is kind for child in parent.children()) > 1
                if has_siblings and next(self.model.get_submodule(element).children(), None) is not None:
                    return True
        return False

    def _in_block(self, owner: Owner, p: Tensor) -> Iterator[Finding]:
        if any(is_within(owner.path, unit.root) for unit in self.units):
            return  # an unrecognised parameter of an attention
        if not self.is_block and self._limb(owner.path) not in self.usual:
            return  # a child that blocks with a recognised attention do not have: possibly another mixer
        kind = type(owner.module).__name__
        if is_linear(owner.module) and self._is_router(owner):
            yield Finding("Other", _role("router", owner), f"{kind} with one output for each expert")
        elif not is_linear(owner.module) and (finding := by_name(owner)) is not None and finding.type != "FFN":
            yield finding
        elif is_linear(owner.module) or p.ndim >= 2:
            yield Finding("FFN", _role("feed-forward", owner), f"{kind} of a block, outside its attention", certain=False)

    def _limb(self, path: str) -> tuple[str, str]:
        """Return name and class of the child of a block that a module lies in."""
        index = self.layers.index(path)
        block = self.layers.paths[index] if index is not None else ""
        child = path.removeprefix(f"{block}.").split(".")[0] if path != block else ""
        return child, type(self.model.get_submodule(f"{block}.{child}" if child else block)).__name__

    def _usual(self) -> set[tuple[str, str]]:
        """Return the children of those blocks that hold an attention."""
        children = set()
        for block in self.layers.paths:
            if any(is_within(unit.path, block) for unit in self.units):
                paths = (f"{block}.{child}" for child, _ in self.model.get_submodule(block).named_children())
                children |= {self._limb(at) for at in (block, *paths)}
        return children

    def _is_router(self, owner: Owner) -> bool:
        """Whether a layer has as many outputs as there are experts beside it, or in its parent module."""
        outputs = owner.module.get_parameter("weight").shape[0]
        path = owner.path
        for _ in range(2):
            path = path.rpartition(".")[0]
            for at, module in self.model.get_submodule(path).named_modules(prefix=path):
                if any(getattr(module, name, None) == outputs for name in _EXPERTS):
                    return True
                if isinstance(module, nn.ModuleList) and len(module) == outputs > 1 and not is_within(owner.path, at):
                    return True
            if path in self.layers.paths:
                break
        return False


def _width(model: nn.Module, layers: Layers) -> int:
    """Return the width of the residual stream: the size of the first norm of the first block, or 0."""
    norms = (m for block in layers.paths[:1] for m in model.get_submodule(block).modules() if is_norm(m))
    first = next(norms, None)
    return 0 if first is None else next((p.shape[0] for p in first.parameters()), 0)


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
    """Return the layer that a model of transformers or timm names as its head."""
    for name in ("get_output_embeddings", "get_classifier"):
        if callable(ask := getattr(model, name, None)):
            try:
                layer = ask()
            except (AttributeError, NotImplementedError, TypeError):
                continue
            if isinstance(layer, nn.Module) and is_linear(layer):
                return layer
    return None
