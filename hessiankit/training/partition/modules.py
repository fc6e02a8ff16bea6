"""Kinds of modules and names of parameters: lookups, linear maps, norms, scales, and hessiankit's own modules."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from hessiankit.blocks import (
    Attention,
    ClassHead,
    FeedForward,
    GroupNorm,
    MeanPoolHead,
    PatchEmbedding,
    TokenEmbedding,
    TokenHead,
    TransformerBlock,
)
from hessiankit.training.partition.findings import Finding, Owner

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase, GroupNorm)

_HEADS = (TokenHead, ClassHead, MeanPoolHead)


def is_lookup(module: nn.Module) -> bool:
    """Whether a module looks up rows of its weight."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map with a ``weight``: nn.Linear, a convolution, GPT-2's Conv1D, and similar."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim >= 2 and not is_lookup(module) and not isinstance(module, _NORMS)


def output_axis(module: nn.Module, leaf: str) -> int:
    """Return the axis of a module's parameter along which its outputs lie; of a table the axis of its rows.

    hessiankit's blocks multiply X W, as GPT-2's Conv1D does; torch's layers multiply X W^T.

    >>> output_axis(nn.Linear(2, 3), "weight"), output_axis(FeedForward(2, 3), "W_1"), output_axis(FeedForward(2, 3), "b_1")
    (0, 1, 0)
    """
    is_block = isinstance(module, (Attention, FeedForward, PatchEmbedding, *_HEADS)) and leaf.startswith("W_")
    is_conv1d = type(module).__name__ == "Conv1D" and leaf == "weight"
    return 1 if is_block or is_conv1d else 0


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: torch's by class, others by their output.

    A module without children whose parameters are vectors of one length, and whose output does not change when its input is
    multiplied by 16, is a norm; its name does not matter.

    >>> is_norm(nn.LayerNorm(3)), is_norm(nn.Linear(3, 3)), is_norm(nn.PReLU(3))
    (True, False, False)
    """
    if isinstance(module, _NORMS):
        return True
    rows = _rows_of(module)
    if rows is None:
        return False
    base, scale_output, negative_output = (_forward(module, x) for x in (2 * rows, 32 * rows, -2 * rows))
    if base is None or scale_output is None or negative_output is None:
        return False
    is_invariant = (base - scale_output).abs().max() <= 1e-2 * base.abs().max()
    return bool(is_invariant) and bool((base - negative_output).abs().max() > 0)  # not a constant


def is_scale(module: nn.Module) -> bool:
    """Whether a module only multiplies the entries of a row by a vector of its own, as LayerScale does.

    >>> layer = nn.Module()
    >>> layer.gamma, layer.forward = nn.Parameter(torch.tensor([2.0, 3.0])), lambda x: x * layer.gamma
    >>> is_scale(layer), is_scale(nn.LayerNorm(3))
    (True, False)
    """
    rows = _rows_of(module)
    if rows is None or len(list(module.parameters())) != 1:
        return False
    output = _forward(module, rows)
    return output is not None and torch.equal(output, rows * next(module.parameters()))


def _rows_of(module: nn.Module) -> Tensor | None:
    """Return rows to evaluate a module on, if it has no children and its parameters are vectors of one length."""
    vectors = list(module.parameters())
    if not vectors or next(module.children(), None) is not None or vectors[0].is_meta or not vectors[0].is_floating_point():
        return None
    if any(p.ndim != 1 or p.shape != vectors[0].shape for p in vectors):
        return None
    row = torch.linspace(-1.0, 2.0, vectors[0].shape[0], device=vectors[0].device, dtype=vectors[0].dtype)
    return torch.stack([row, row.square()])


def _forward(module: nn.Module, rows: Tensor) -> Tensor | None:
    """Return a module's output for some rows, or None if it has another shape."""
    try:
        with torch.no_grad():  # forward, not the call: no hook of the user runs
            output = module.forward(rows)
    except Exception:  # any error of another library: not a map of rows
        return None
    return output if isinstance(output, Tensor) and output.shape == rows.shape else None


_RULES = (
    (r"sinks?$", "Other", "attention sink"),
    (r"(^|\.)downsampl\w*\.", "Other", "map between blocks"),
    (r"att\w*\.(\w+\.)*(g|gate|g_proj|gate_proj|wg)\.\w+$", "Other", "attention gate"),
    (r"(^|[._])logit_?(scale|bias)$", "Head", "logit scale"),
    (r"(pos|position)[a-z_]*(emb|embed|embedding|embeddings|bias|table|encoding)", "Emb", "position embedding"),
    (r"(cls|class|reg|register|mask|dist|distill?ation|prompt|query)_?(token|tokens|embed|embedding)$", "Emb", "learned token"),
    (r"(^|\.)(probe|latents?)$", "Emb", "learned token"),
    (r"(^|\.)(lm_head|heads?|classifier|score|pooler|predictions?|output_projection|unembed\w*)(\.|$)", "Head", "head"),
    (r"(^|\.)(wte|wpe|\w*embed\w*|tok\w*_emb\w*)(\.|$)", "Emb", "embedding"),
    (r"(^|[._])(ln|norm|layernorm|layer_norm|rmsnorm)[\w.]*\.?(weight|bias|gain|scale|g)?$", "Norm", "gain"),
    (r"(^|\.)(gamma|lambda|lambda_\d|layer_?scale\w*|ls\d?|res_?scale\w*)(_\w+)?(\.\w+)?$", "Norm", "scale"),
    (r"(^|\.)q_bias$", "QK", "query bias"),
    (r"(^|\.)k_bias$", "QK", "key bias"),
    (r"(^|\.)v_bias$", "VO", "value bias"),
    (r"(^|\.)(query|key|q_proj|k_proj|wq|wk|w_q|w_k)(\.|$)", "QK", "query or key"),
    (r"(^|\.)(value|v_proj|o_proj|out_proj|wv|wo|w_v|w_o)(\.|$)", "VO", "value or output"),
    (r"(^|\.)(mlp|ffn?|feed_?forward|experts?|fc\d?|c_fc|linear[12]|w[123])(\.|$)", "FFN", "feed-forward"),
    (r"(^|\.)(router|gate)(\.|$)", "Other", "router"),
)


def by_name(owner: Owner) -> Finding | None:
    """Return the first of a list of name rules that matches, or None.

    >>> from torch import nn
    >>> by_name(Owner("", nn.Identity(), "pos_embed")).role, by_name(Owner("mixer", nn.Identity(), "A_log"))
    ('position embedding', None)
    """
    name = owner.name.lower()
    for rule, block_type, role in _RULES:
        if re.search(rule, name):
            if owner.leaf == "bias":
                role = "norm bias" if role == "gain" else f"{role} bias"
            return Finding(block_type, role, f"the name {owner.name!r}", certain=False)
    return None


def _with_biases(**roles: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """Return (type, role) of weights ``W_x`` and biases ``b_x`` by the letter x."""
    weights = {f"W_{letter}": kind_and_role for letter, kind_and_role in roles.items()}
    return weights | {f"b_{letter}": (kind, f"{role} bias") for letter, (kind, role) in roles.items()}


_POSITIONS = {"P": ("Emb", "position embedding")}
_TYPES = {  # type and role of hessiankit's parameters
    Attention: _with_biases(Q=("QK", "query"), K=("QK", "key"), V=("VO", "value"), O=("VO", "output")),
    FeedForward: _with_biases(**{"1": ("FFN", "up"), "2": ("FFN", "down"), "G": ("FFN", "gate")}),
    GroupNorm: {"weight": ("Norm", "gain"), "bias": ("Norm", "norm bias")},
    TokenEmbedding: {"W_E": ("Emb", "token embedding")} | _POSITIONS,
    PatchEmbedding: _with_biases(E=("Emb", "patch embedding")) | _POSITIONS,
    TokenHead: _with_biases(C=("Head", "head"), E=("Head", "head")),
    MeanPoolHead: _with_biases(C=("Head", "head")),
    ClassHead: _with_biases(C=("Head", "head")),
}


_NO_TYPE = {"indexer": r"Indexer$", "hyper-connection": r"Hyper(Connection|Head)", "modulation": r"Focal\w*Modulation$"}
"""Parts of a model that are none of the paper's types, by the class: what chooses the keys of sparse attention by a top-k, the
weights between several residual streams, and the modulation of FocalNet."""


def untyped_role(module: nn.Module) -> str | None:
    """Return the role of the weights of a module whose class is of type Other, or None.

    >>> untyped_role(type("SparseIndexer", (nn.Module,), {})()), untyped_role(nn.Linear(1, 1))
    ('indexer', None)
    """
    return next((role for role, rule in _NO_TYPE.items() if re.search(rule, type(module).__name__)), None)


def own_type(owner: Owner) -> tuple[str, str] | None:
    """Return block type and role of a parameter of hessiankit's own modules; None for a module of another library.

    The models of The Sharpness Disparity Principle have no learnable scales beside the norms' gains; those of a placement
    (LayerScale's lambda, Admin's omega) count as ``Norm``.

    >>> own_type(Owner("", FeedForward(2, 3), "W_1"))
    ('FFN', 'up')
    """
    module = owner.module
    if isinstance(module, TransformerBlock):
        scales = {f"{scale.name}_{k}" for scale in module.own_placement.scales for k in (1, 2)}
        return ("Norm", "scale") if owner.leaf in scales else None
    return next((types.get(owner.leaf) for kind, types in _TYPES.items() if isinstance(module, kind)), None)
