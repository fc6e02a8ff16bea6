"""Attention modules: their weights, or slices of them, for queries, keys, values and the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from hessiankit.blocks import Attention
from hessiankit.training.partition.findings import ROLE_OF, TYPE_OF_ROLE, Finding
from hessiankit.training.partition.fused import fused_slices
from hessiankit.training.partition.modules import is_linear, is_norm

_OF_OUTPUT = "o o_proj out_proj proj c_proj dense out out_lin wo w_o to_out output o_linear linear_o out_linear"
_OUTPUTS = frozenset(_OF_OUTPUT.split())


@dataclass
class AttentionUnit:
    """One attention: the path of the module with the query, key and value layers, the root that also holds the output layer."""

    path: str
    root: str
    kind: str
    roles: dict[int, list[Finding]] = field(default_factory=dict)  # by the parameter's id


def attention_units(model: nn.Module, findings_by_module: dict[str, dict[int, list[Finding]]]) -> list[AttentionUnit]:
    """Return every attention of a model, recognised by module types, attributes, sizes and names of children."""
    units = []
    for path, module in model.named_modules():
        if isinstance(module, Attention):  # hessiankit's own, whose parameters say it themselves
            units.append(AttentionUnit(path, path, "Attention"))
            continue
        unit = AttentionUnit(path, path, type(module).__name__, dict(findings_by_module.get(path, {})))
        for child, layer in module.named_children():
            role = ROLE_OF.get(child.lower())
            if role is not None and not is_norm(layer):
                for inner in filter(is_linear, layer.modules()):
                    _add(unit, inner, role, f"{child} of {unit.kind}")
        _add_thirds(unit, module)
        if isinstance(module, nn.MultiheadAttention):
            _add_torch(unit, module)
        roles = {finding.role.removesuffix(" bias") for findings in unit.roles.values() for finding in findings}
        if {"query", "key"} <= roles or {"key", "value"} <= roles:
            _add_output(unit, model, module)
            units.append(unit)
    return units


def fused_findings(model: nn.Module) -> dict[str, dict[int, list[Finding]]]:
    """Return the findings on slices of fused weights, by the path of the module that holds them and the parameter's id."""
    findings: dict[str, dict[int, list[Finding]]] = {}
    for one in fused_slices(model):
        role = one.role.replace("_", " ")
        reason = f"slice of {one.parameter.removeprefix(one.owner + '.')} of {type(model.get_submodule(one.owner)).__name__}"
        role_name = f"{role} bias" if one.kind == "bias" else role
        finding = Finding(TYPE_OF_ROLE[role], role_name, reason, one.axis, one.merged)
        findings.setdefault(one.owner, {}).setdefault(id(model.get_parameter(one.parameter)), []).append(finding)
    return findings


def _add(unit: AttentionUnit, layer: nn.Module, role: str, reason: str) -> None:
    for leaf, p in layer.named_parameters(recurse=False):
        role_name = f"{role} bias" if p.ndim < 2 else role
        if leaf in ("weight", "bias"):
            unit.roles.setdefault(id(p), [Finding(TYPE_OF_ROLE[role], role_name, reason)])


def _add_thirds(unit: AttentionUnit, module: nn.Module) -> None:
    """Read a ``c_attn`` with three times as many outputs as inputs as GPT-2's where head sizes are unknown; not certain."""
    layer = getattr(module, "c_attn", None)
    if not isinstance(layer, nn.Linear) or id(layer.weight) in unit.roles or layer.out_features != 3 * layer.in_features:
        return
    width, why = layer.in_features, "third of c_attn, as in GPT-2"
    for leaf, p in layer.named_parameters(recurse=False):
        suffix = "" if leaf == "weight" else " bias"
        unit.roles[id(p)] = [
            Finding(TYPE_OF_ROLE[role], role + suffix, why, 0, ((k * width, (k + 1) * width),), certain=False)
            for k, role in enumerate(("query", "key", "value"))
        ]


def _add_torch(unit: AttentionUnit, module: nn.MultiheadAttention) -> None:
    weights = {f"{role[0]}_proj_weight": (role, role) for role in ("query", "key", "value")}
    biases = {f"bias_{role[0]}": (role, f"learned {role}") for role in ("key", "value")}
    for leaf, (role, role_name) in (weights | biases).items():
        if isinstance(p := getattr(module, leaf), Tensor):
            unit.roles[id(p)] = [Finding(TYPE_OF_ROLE[role], role_name, f"{leaf} of nn.MultiheadAttention")]
    _add(unit, module.out_proj, "output", "out_proj of nn.MultiheadAttention")


def _add_output(unit: AttentionUnit, model: nn.Module, module: nn.Module) -> None:
    """Find the output layer: the one linear map left in the module, else in its nearest ancestor that has one."""
    while True:
        maps = list(_linear_maps(unit, module))
        output_maps = [(child, layer) for child, layer in maps if set(child.lower().split(".")) & _OUTPUTS]
        for child, layer in output_maps if len(maps) > 1 else maps:
            _add(unit, layer, "output", f"{child} of {type(module).__name__}, which holds the attention")
        if maps or not unit.root:
            return
        parent_path = unit.root.rpartition(".")[0]
        parent = model.get_submodule(parent_path)
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) or len(list(_linear_maps(unit, parent))) > 1:
            return  # a list of blocks, or a whole block: its other layers are not attention's
        unit.root, module = parent_path, parent


def _linear_maps(unit: AttentionUnit, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child, layer in module.named_modules():
        if is_linear(layer) and not any(id(p) in unit.roles for p in layer.parameters(recurse=False)):
            yield child, layer
