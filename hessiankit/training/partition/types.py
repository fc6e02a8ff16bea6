"""The block type of every entry of a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.training.partition.adapters import adapted_parameters, without_adapters
from hessiankit.training.partition.findings import CONFLICT, UNKNOWN, Finding, Policy, merged, override, owners
from hessiankit.training.partition.flow_findings import flow
from hessiankit.training.partition.modules import by_name
from hessiankit.training.partition.part import BlockTypes, Part
from hessiankit.training.partition.structure import Layers, structure


@checked("model_parts", sharded=True)
def model_parts(
    model: nn.Module,
    *,
    inputs: Any = None,
    overrides: Mapping[str, str] | None = None,
    biases: str = "layer",
    final_norm: str = "Norm",
    tied: str = "Emb",
) -> tuple[Part, ...]:
    """Return the parts of a model: every entry of every parameter in exactly one part, with one block type.

    The types are those of The Sharpness Disparity Principle (Sec. 3.2): Emb, QK, VO, FFN, Norm; and Head and Other for what it
    leaves out. With ``inputs``, the flow of data through one run decides first, which reads no names: what feeds a softmax of
    products is QK, whatever the order of a fused weight or of additions. A vector that is added to one sum of layers of several
    types, as in a parallel block, is the bias of none of them. For the rest, and without ``inputs``, module types, attributes and
    sizes decide, then names.

    Cases that the paper leaves open, all of which ``overrides`` can change: Position, segment and relative position
    embeddings, learned tokens and what maps the input to the model's width are Emb. Norms of queries and keys are Norm, and so
    are learnable scales of a branch (LayerScale) and the bias of a norm. Experts are FFN; their router is Other, as are
    attention sinks, gates of attention's output, indexers of sparse attention (no gradient passes their top-k), weights between
    residual streams (hyper-connections), FocalNet's modulation, and what keys and values share (the latent of multi-head latent
    attention). Poolers and scales of logits are Head. A parameter of
    an adapter of peft has the type of the weight that it adapts: the rows of LoRA's B are split as the weight's outputs are, and
    an A of outputs of several types is Other.

    Args:
        model: Any module.
        inputs: Example inputs, of two tokens or more: a tensor, a tuple of positional or a mapping of keyword arguments.
        overrides: Regular expression to type; each is searched (``re.search``) in the part's and the parameter's name.
        biases: ``"layer"``: a bias has the type of its layer. ``"Other"``. Key biases have the role ``"key bias"``: without
            rotary embeddings or norms of keys their gradient is zero identically, since softmax does not see them.
        final_norm: Type of norms that follow the last block: ``"Norm"``, ``"Other"`` or ``"Head"``.
        tied: Type of a parameter that is the embedding and the head: ``"Emb"`` or ``"Head"``.

    Returns:
        The parts, in the order of ``named_parameters()``.

    Raises:
        InputError: If something is not recognised (all of it is named), if modules and flow of data contradict each other, or
            an option is not one.
        TraceError: If the model computes on ``inputs`` where torch's tracer does not see it.

    >>> parts = model_parts(nn.TransformerEncoderLayer(4, 2, 6, bias=False))
    >>> [(part.name, part.type) for part in parts][:3]
    [('self_attn.in_proj_weight[0:4]', 'QK'), ('self_attn.in_proj_weight[4:8]', 'QK'), ('self_attn.in_proj_weight[8:12]', 'VO')]
    """
    return _recognised(_typed(model, inputs, Policy(biases, final_norm, tied), overrides), inputs)


def parts_on(model: nn.Module, inputs: Any) -> tuple[Part, ...]:
    """Return the parts of a model by modules and names; where these do not give all types, by the flow of ``inputs`` first.

    >>> import torch
    >>> layer = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    >>> [part.type for part in parts_on(layer, torch.tensor([[1, 2]]))]
    ['Emb', 'Head', 'Head']
    """
    policy = Policy("layer", "Norm", "Emb")
    parts = _typed(model, None, policy, None)
    if any(part.type == UNKNOWN for part in parts):
        parts = _typed(model, inputs, policy, None)
    return _recognised(parts, inputs)


def _typed(model: nn.Module, inputs: Any, policy: Policy, overrides: Mapping[str, str] | None) -> tuple[Part, ...]:
    """Return the parts of a model, with the types UNKNOWN and CONFLICT where there are no others."""
    bare = without_adapters(model)
    places = owners(bare)
    layers, findings = structure(bare, places)
    by_parameter = flow(model, inputs) if inputs is not None else {}
    flows = {id(p): by_parameter[name] for name, p in model.named_parameters() if name in by_parameter}
    plain = {id(p): name for name, p in bare.named_parameters()}
    adapters = adapted_parameters(model)

    def found_of(p: Tensor) -> tuple[list[Finding], str]:
        """Return the findings on a parameter of the model without adapters, and the path of the module that holds it."""
        flow_findings, place = flows.get(id(p), []), places[plain[id(p)]][0]
        typed_findings = [f for f in flow_findings if f.type != UNKNOWN or f.axis is not None]
        result = policy.of_tie(merged(typed_findings, findings[plain[id(p)]], p))
        fallback = Finding(UNKNOWN, "", type(place.module).__name__)
        return result or [by_name(place) or next(iter(flow_findings), fallback)], place.path

    parts: list[Part] = []
    for name, p in model.named_parameters():
        if id(p) in plain:
            part_findings, path = found_of(p)
        elif name in adapters:
            base, path = found_of(adapters[name].parameter)
            part_findings = adapters[name].findings(base, p)
        else:
            part_findings, path = flows.get(id(p), [Finding(UNKNOWN, "", "a parameter of an adapter")]), ""
        parts += _of_parameter(name, p, part_findings, path, layers, policy)
    return override(parts, overrides)


def _recognised(parts: tuple[Part, ...], inputs: Any) -> tuple[Part, ...]:
    """Return parts of which every one has a type; else raise an error."""
    if conflicts := [part for part in parts if part.type == CONFLICT]:
        text = "; ".join(f"{part.name!r} is {part.reason}" for part in conflicts)
        raise InputError(f"model_parts: modules and flow of data contradict each other: {text}; say which with overrides=")
    if unknowns := [part for part in parts if part.type == UNKNOWN]:
        text = ", ".join(f"{part.name!r} ({part.reason})" for part in unknowns)
        hint = "" if inputs is not None else "inputs=..., example inputs whose flow shows the types, or "
        raise InputError(
            f"model_parts: not recognised: {text}; pass {hint}overrides={{regular expression: type}} "
            "to hessiankit.block_types; spectrum takes the result as by=, sharpness, blockwise_lr and Monitor its .parts"
        )
    return parts


@checked("block_types", sharded=True)
def block_types(
    model: nn.Module,
    *,
    inputs: Any = None,
    overrides: Mapping[str, str] | None = None,
    biases: str = "layer",
    final_norm: str = "Norm",
    tied: str = "Emb",
) -> BlockTypes:
    """Return the block type of every part of a model, by its name: a dict that prints as a table.

    The arguments are those of :func:`model_parts`, which says how the types are found.

    >>> types = block_types(nn.TransformerEncoderLayer(4, 2, 6, bias=False))
    >>> types["linear1.weight"], types.entries
    ('FFN', {'QK': 32, 'VO': 32, 'FFN': 48, 'Norm': 8})
    """
    return BlockTypes(model_parts(model, inputs=inputs, overrides=overrides, biases=biases, final_norm=final_norm, tied=tied))


def _of_parameter(name: str, p: Tensor, findings: list[Finding], path: str, layers: Layers, policy: Policy) -> list[Part]:
    parts = []
    for f in findings:
        cut = sum(b - a for a, b in f.segments)
        size = p.numel() if f.axis is None else p.numel() // p.shape[f.axis] * cut
        part = Part(name, f.type, f.role, layers.index(path), f.reason, size, f.axis, f.segments)
        parts.append(policy.of_part(part, is_final=layers.is_final(path)))
    assert sum(part.size for part in parts) == p.numel(), f"the parts of {name} are not all of it"
    return parts
