"""Adapters of the peft library: the model without them, and the weight that each of their parameters adapts.

A layer of peft holds the layer that it adapts as ``base_layer``, and a module that is trained as a copy holds the original
one. They are recognised by these attributes, so that peft is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from hessiankit.training.partition.findings import Finding, child_path

_OF_OUTPUTS = ("lora_B", "lora_magnitude_vector", "ia3_l", "vera_lambda_b")
"""Parameters of adapters whose first axis is that of the outputs."""


@dataclass(frozen=True)
class Adapted:
    """Target of a parameter of an adapter: a weight, or a bias, of the model without adapters.

    Its kind is ``"copy"`` where it takes the place of that parameter, ``"outputs"`` where its first axis is that of the weight's
    outputs, ``"bias"`` the same of a vector that is added, and ``"other"`` where every entry acts on all outputs.
    """

    parameter: Tensor
    kind: str

    def findings(self, base: list[Finding], p: Tensor) -> list[Finding]:
        """Return the findings on a parameter of an adapter, from those on its target.

        The rows of B are split as the weight's outputs are. What acts on outputs of several types, as A does, is of type Other,
        like a latent that keys and values share.

        >>> query, value = Finding("QK", "query", "fused", 0, ((0, 3),)), Finding("VO", "value", "fused", 0, ((3, 6),))
        >>> [f.segments for f in Adapted(Tensor(6, 4), "outputs").findings([query, value], Tensor(6, 2))]
        [((0, 3),), ((3, 6),)]
        >>> [(f.type, f.role) for f in Adapted(Tensor(6, 4), "other").findings([query, value], Tensor(2, 4))]
        [('Other', 'latent')]
        """
        suffix = " bias" if self.kind == "bias" else ""
        findings = [replace(f, role=f.role + suffix, reason=f"it adapts a weight: {f.reason}") for f in base]
        if self.kind == "copy" or not base:
            return findings
        axis = base[0].axis
        if axis is None:
            return findings[:1]
        if self.kind != "other" and p.shape[0] == self.parameter.shape[axis]:
            return [replace(f, axis=0) for f in findings]
        types, roles = (list(dict.fromkeys(getattr(f, name) for f in base)) for name in ("type", "role"))
        role = roles[0] if len(roles) == 1 else "latent"
        why = f"it adapts a weight that makes {' and '.join(roles)}"
        return [Finding(types[0] if len(types) == 1 else "Other", role, why)]


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model with the layers that adapters adapt in the adapters' places; unchanged if it has none.

    Modules without adapters and all parameters are shared with the model; nothing of the model changes.

    >>> layer = nn.Sequential(nn.Linear(2, 2))
    >>> without_adapters(layer) is layer
    True
    """
    return _bare(model, {})


def _bare(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in twins:
        if (inner := _inside(module)) is not None:
            twins[id(module)] = _bare(inner, twins)
        else:
            children = {name: child and _bare(child, twins) for name, child in module._modules.items()}
            twin = module
            if any(child is not module._modules[name] for name, child in children.items()):
                twin = object.__new__(type(module))
                twin.__dict__.update(module.__dict__, _modules=children)
            twins[id(module)] = twin
    return twins[id(module)]


def _inside(module: nn.Module) -> nn.Module | None:
    """Return the layer that a layer of peft adapts, or the module that it trains in place of the original."""
    if not hasattr(type(module), "adapter_layer_names"):
        return None
    if isinstance(copies := module._modules.get("modules_to_save"), nn.ModuleDict):
        active = next((name for name in getattr(module, "active_adapters", ()) if name in copies), next(iter(copies), None))
        return copies[active] if active is not None else module.get_submodule("original_module")
    layers = (module._modules.get(name) for name in ("base_layer", "token_adapter"))
    return next((inner for inner in layers if inner is not None), None)


def adapted_parameters(model: nn.Module) -> dict[str, Adapted]:
    """Return the target of every parameter of an adapter, by its name in ``named_parameters()``."""
    targets: dict[str, Adapted] = {}
    for path, module in model.named_modules():
        if (inner := _inside(module)) is None:
            continue
        base = without_adapters(inner)
        base_ids = {id(p) for p in inner.parameters()}
        for name, p in module.named_parameters():
            if id(p) not in base_ids and (target := _of_parameter(name, module, base)) is not None:
                targets.setdefault(child_path(path, name), target)
    return targets


def _of_parameter(name: str, module: nn.Module, base: nn.Module) -> Adapted | None:
    """Return the target of one parameter of a layer of peft; None where the layer has no weight."""
    if isinstance(module._modules.get("modules_to_save"), nn.ModuleDict):
        leaf = name.split(".", 2 if name.startswith("modules_to_save.") else 1)[-1]
        return next((Adapted(x, "copy") for at, x in base.named_parameters() if at == leaf), None)
    weights = dict(base.named_parameters(recurse=False))
    weight = weights.get(getattr(module, "parameter_name", "weight"))
    if weight is None:
        weight = next((x for x in weights.values() if x.ndim >= 2), None)
    if weight is None:
        return None
    of_outputs = not set(_OF_OUTPUTS).isdisjoint(name.split("."))
    return Adapted(weight, "other" if not of_outputs else "bias" if name.endswith("bias") else "outputs")
