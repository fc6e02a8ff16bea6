"""Slices of fused weights: the rows of ``qkv.weight`` that make the queries, those of head 3, and readable names for them.

Every known layout keeps the rows of one head together, so it is a list of segments for each role. Two orders occur: role by
role, [q heads][k heads][v heads] (torch, GPT-2, ViT, Phi-3, with fewer key heads where they are grouped), and group by group,
[group][q heads, k, v] (GPT-NeoX, Bloom, Falcon, StarCoder with separate keys).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from hessiankit.blocks import Attention
from hessiankit.support.arguments import checked
from hessiankit.training.partition.adapters import without_adapters
from hessiankit.training.partition.findings import ROLE_OF
from hessiankit.training.partition.part import indexed

Layout: TypeAlias = "dict[str, list[tuple[int, int]]]"  # role -> (first, after last) output of each head
Fused: TypeAlias = "tuple[Tensor, str, int, Layout]"  # parameter, "weight" or "bias", axis of the outputs, their layout

_ROLES = ("query", "key", "value")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_heads_kv")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


@dataclass(frozen=True)
class FusedSlice:
    """One role of a fused parameter."""

    owner: str  # path of the module that holds the fused layer
    role: str  # "query", "key", "value", "gate", "up", "latent" or "shared_key"
    kind: str  # "weight" or "bias"
    parameter: str
    axis: int
    segments: tuple[tuple[int, int], ...]  # (first, after last) along the axis, of each head

    @property
    def merged(self) -> tuple[tuple[int, int], ...]:
        """The segments, adjacent ones merged."""
        firsts, ends = ({segment[k] for segment in self.segments} for k in (0, 1))
        return tuple(zip(sorted(firsts - ends), sorted(ends - firsts), strict=True))


def fused_slices(module: nn.Module, *, separate: bool = False) -> Iterator[FusedSlice]:
    """Yield the slices of a module's fused parameters; with ``separate``, also of query, key and value layers of their own."""
    names = {id(p): name for name, p in module.named_parameters()}
    for path, child in without_adapters(module).named_modules():
        for parameter, kind, axis, layout in [*_fused(child), *(_separate(child) if separate else ())]:
            if (name := names.get(id(parameter))) is not None:  # else it is computed from other parameters
                for role, segments in layout.items():
                    yield FusedSlice(path, role, kind, name, axis, tuple(segments))


@checked("named_slices", sharded=True)
def named_slices(module: nn.Module, *, heads: bool = False) -> dict[str, str]:
    """Return readable names for the parts of a module's fused weights, each with the index string that selects the part.

    An index string is what ``params=`` and ``Hessian.block`` take; where a part is not one slice, it holds several, with
    semicolons between (see :func:`hessiankit.request.selection.parse_part`). Recognised, by class, attributes and sizes,
    names last:

    * ``nn.MultiheadAttention``: ``in_proj_weight``, ``in_proj_bias``;
    * ``c_attn``: a (in, out) Conv1D of GPT-2 and its kin; an ``nn.Linear`` beside ``n_head`` and ``n_embd``, as in nanoGPT;
      GPT-BigCode (StarCoder), with and without multi-query attention;
    * ``qkv``, ``Wqkv``: an ``nn.Linear`` beside ``head_dim`` and a number of heads: timm, ModernBERT, MPT, DBRX;
    * ``qkv_proj``: an ``nn.Linear`` beside ``head_dim`` and ``num_key_value_heads``: Phi-3;
    * ``query_key_value``: GPT-NeoX, Bloom, Persimmon, and the three arrangements of Falcon;
    * ``qkv_proj`` of CodeGen: four groups, each with its queries, values, keys;
    * ``kv_b_proj`` and ``kv_a_proj_with_mqa`` of multi-head latent attention (DeepSeek): keys and values of each head from a
      latent, which the second makes beside the keys that carry the position;
    * ``gate_up_proj`` with its ``down_proj``: gate first, as in Phi-3 and GLM; also the experts of Mixtral and Qwen-MoE,
      stacked ``(experts, out, in)``.

    A fused weight of which this cannot tell how it is arranged is not listed: MiniMax's ``qkv_proj``, LeViT's and TinyViT's
    ``qkv``, weights of quantised or re-parametrised layers.

    Args:
        module: Any module.
        heads: Whether to give every head by itself, also those of separate query, key and value layers
            (``q_proj, k_proj, v_proj``; ``query, key, value``; ``wq, wk, wv``), with fewer key heads where they are grouped.

    Returns:
        ``"<attention>.query.weight"``, or ``"<attention>.query.head_0.weight"``, to ``"<parameter>[...]"``.

    >>> slices = named_slices(nn.MultiheadAttention(4, 2))
    >>> slices["key.weight"], slices["value.bias"]
    ('in_proj_weight[4:8]', 'in_proj_bias[8:12]')
    >>> named_slices(nn.MultiheadAttention(4, 2), heads=True)["key.head_1.weight"]
    'in_proj_weight[6:8]'
    """
    names: dict[str, str] = {}
    for one in fused_slices(module, separate=heads):
        path = f"{one.owner}.{one.role}" if one.owner else one.role
        if heads and one.role in _ROLES:
            for h, segment in enumerate(one.segments):
                names[f"{path}.head_{h}.{one.kind}"] = indexed(one.parameter, one.axis, [segment])
        else:
            names[f"{path}.{one.kind}"] = indexed(one.parameter, one.axis, one.merged)
    return names


def _layout(blocks: Iterable[tuple[str, int]]) -> Layout:
    """Return the segments of blocks, each with its role and width, that follow one another.

    >>> _layout([("key", 2), ("value", 3)] * 2)
    {'key': [(0, 2), (5, 7)], 'value': [(2, 5), (7, 10)]}
    """
    layout: Layout = {}
    start = 0
    for role, width in blocks:
        layout.setdefault(role, []).append((start, start + width))
        start += width
    return layout


def _by_role(heads: int, key_heads: int, head_dim: int) -> Layout:
    """[q heads][k heads][v heads], each head ``head_dim`` wide."""
    counts = zip(_ROLES, (heads, key_heads, key_heads), strict=True)
    return _layout((role, head_dim) for role, count in counts for _ in range(count))


def _by_group(heads: int, groups: int, head_dim: int) -> Layout:
    """[group][its q heads, k, v], each head ``head_dim`` wide."""
    return _layout([*[("query", head_dim)] * (heads // groups), ("key", head_dim), ("value", head_dim)] * groups)


def _fused(module: nn.Module) -> Iterator[Fused]:
    if isinstance(module, nn.MultiheadAttention):
        yield from _of_both(
            module.in_proj_weight, module.in_proj_bias, _by_role(module.num_heads, module.num_heads, module.head_dim)
        )
        return
    heads, head_dim = _count(module, _HEADS), _count(module, _HEAD_DIM)
    key_heads = _count(module, _KEY_HEADS) or heads
    if isinstance(c_attn := getattr(module, "c_attn", None), nn.Module):
        yield from _c_attn(module, c_attn, heads, head_dim)
    if heads and key_heads and head_dim and heads % key_heads == 0:
        for name in ("qkv", "Wqkv"):
            yield from _of_linear(getattr(module, name, None), _by_role(heads, key_heads, head_dim))
        if _own(module, _KEY_HEADS):  # without it the order differs from family to family
            yield from _of_linear(getattr(module, "qkv_proj", None), _by_role(heads, key_heads, head_dim))
    if heads and head_dim:
        yield from _of_linear(getattr(module, "query_key_value", None), _megatron(module, heads, head_dim))
        if type(module).__name__ == "CodeGenAttention" and heads % 4 == 0:  # nothing else tells its order
            yield from _of_linear(getattr(module, "qkv_proj", None), _codegen(heads, head_dim))
    yield from _latent(module, heads)
    yield from _gate_up(module)


def _c_attn(module: nn.Module, layer: nn.Module, heads: int, head_dim: int) -> Iterator[Fused]:
    conv = type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int)
    if conv and heads and isinstance(weight := getattr(layer, "weight", None), Tensor) and weight.ndim == 2:
        width = weight.shape[1]  # (in, out), the transpose of nn.Linear's
        cross = width == 2 * weight.shape[0]  # cross-attention: the queries have a layer of their own
        size, rest = divmod(width, (2 if cross else 3) * heads)
        if rest == 0 and width in (2 * weight.shape[0], 3 * weight.shape[0]):
            yield from _of_both(weight, getattr(layer, "bias", None), _by_role(0 if cross else heads, heads, size), 1)
    elif isinstance(multi_query := getattr(module, "multi_query", None), bool) and heads and head_dim:
        layout = _by_role(heads, 1, head_dim) if multi_query else _by_group(heads, heads, head_dim)
        if not getattr(module, "is_cross_attention", False):
            yield from _of_linear(layer, layout)
    else:
        heads, n_embd = _own(module, ("n_head",)), _own(module, ("n_embd",))
        if heads and n_embd and n_embd % heads == 0:
            yield from _of_linear(layer, _by_role(heads, heads, n_embd // heads))


def _megatron(module: nn.Module, heads: int, head_dim: int) -> Layout:
    """``query_key_value``, which Falcon arranges in three ways and the others head by head."""
    new = getattr(module, "new_decoder_architecture", None)
    if new is True:
        groups = _count(module, _KEY_HEADS)
        return _by_group(heads, groups, head_dim) if groups and heads % groups == 0 else {}
    if new is False and getattr(module, "multi_query", None) is True:
        return _by_role(heads, 1, head_dim)
    return _by_group(heads, heads, head_dim)


def _codegen(heads: int, head_dim: int) -> Layout:
    """[group][its q heads, v heads, k heads] of four groups: the order in which CodeGen's weights were made."""
    layout = _layout((role, head_dim) for _ in range(4) for role in ("query", "value", "key") for _ in range(heads // 4))
    return {role: layout[role] for role in _ROLES}


def _latent(module: nn.Module, heads: int) -> Iterator[Fused]:
    """Multi-head latent attention: [latent][rotated key], and [head][key, value] made of the latent."""
    rank, rotary, plain, value = (
        _own(module, (name,)) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    if heads and rank and rotary and plain and value:
        yield from _of_linear(getattr(module, "kv_b_proj", None), _layout([("key", plain), ("value", value)] * heads))
        layout = _layout([("latent", rank), ("shared_key", rotary)])
        yield from _of_linear(getattr(module, "kv_a_proj_with_mqa", None), layout)


def _gate_up(module: nn.Module) -> Iterator[Fused]:
    weight, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if isinstance(down, nn.Linear):
        yield from _of_linear(weight, _layout([("gate", down.in_features), ("up", down.in_features)]))
    elif isinstance(weight, Tensor) and isinstance(down, Tensor) and weight.ndim == down.ndim == 3:
        experts, rows, width = down.shape
        if weight.shape == (experts, 2 * width, rows):  # (experts, in, out), as in GPT-OSS, interleaves them
            yield from _of_parameter(weight, "weight", 1, _layout([("gate", width), ("up", width)]))


def _separate(module: nn.Module) -> Iterator[Fused]:
    """The heads of queries, keys and values that have a layer, or a parameter, each."""
    if isinstance(module, Attention):
        for role, heads in zip(_ROLES, (module.n_heads, module.n_kv_heads, module.n_kv_heads), strict=True):
            weight, bias = (getattr(module, f"{kind}_{role[0].upper()}") for kind in "Wb")
            yield from _of_both(weight, bias, _equal(role, heads, weight.shape[1]), 1)
    elif isinstance(module, nn.MultiheadAttention):
        for role in _ROLES:
            weight = getattr(module, f"{role[0]}_proj_weight")
            yield from _of_parameter(weight, "weight", 0, _equal(role, module.num_heads, module.embed_dim))
    else:
        children = [[child for name, child in module.named_children() if ROLE_OF.get(name.lower()) == role] for role in _ROLES]
        if all(len(layers) == 1 and isinstance(layers[0], nn.Linear) for layers in children):
            yield from _grouped_heads(module, [layers[0] for layers in children])


def _grouped_heads(module: nn.Module, layers: list[Any]) -> Iterator[Fused]:
    widths, heads = [layer.out_features for layer in layers], _count(module, _HEADS)
    if not heads or widths[0] % heads:
        return
    head_dim = _count(module, _HEAD_DIM) or widths[0] // heads
    key_heads = _count(module, _KEY_HEADS) or widths[1] // head_dim
    counts = (heads, key_heads, key_heads)
    if key_heads and heads % key_heads == 0 and widths == [count * head_dim for count in counts]:
        for layer, role, count in zip(layers, _ROLES, counts, strict=True):
            yield from _of_linear(layer, _equal(role, count, layer.out_features))


def _equal(role: str, heads: int, width: int) -> Layout:
    return _layout([(role, width // heads)] * heads)


def _of_linear(layer: object, layout: Layout) -> Iterator[Fused]:
    if isinstance(layer, nn.Linear):
        yield from _of_both(layer.weight, layer.bias, layout)


def _of_both(weight: object, bias: object, layout: Layout, axis: int = 0) -> Iterator[Fused]:
    yield from _of_parameter(weight, "weight", axis, layout)
    yield from _of_parameter(bias, "bias", 0, layout)


def _of_parameter(parameter: object, kind: str, axis: int, layout: Layout) -> Iterator[Fused]:
    """Yield the parameter if the layout covers the axis exactly."""
    ends = [stop for segments in layout.values() for _, stop in segments]
    if isinstance(parameter, Tensor) and ends and parameter.ndim > axis and parameter.shape[axis] == max(ends):
        yield parameter, kind, axis, layout


def _own(module: object, names: tuple[str, ...]) -> int:
    """Return the first of these attributes that is a positive integer, or 0."""
    for name in names:
        try:
            value = getattr(module, name, None)
        except Exception:  # a config may raise because its layers differ in it
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _count(module: nn.Module, names: tuple[str, ...]) -> int:
    """Return :func:`_own` of the module, else of its ``config``: Hugging Face keeps some sizes only there."""
    if count := _own(module, names):
        return count
    config = getattr(module, "config", None)
    return 0 if config is None or isinstance(config, nn.Module) else _own(config, names)
