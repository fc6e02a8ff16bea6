"""``replace_norms``: another norm placement in the blocks of a library's decoder, with its weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.placements import Placement, placement_of_layer
from hessiankit.request.data import call
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import preserved_state
from hessiankit.training.depth.blocks import find_blocks, first_tensor
from hessiankit.training.partition.modules import is_linear, is_norm

CALLER = "replace_norms"
AGREEMENT = 1e-5
"""Relative difference of a model's output from that of pre-norm blocks, up to which its blocks are pre-norm: float32's."""


class Replaced(nn.Module):
    """A block of a library with the equation of a placement for its forward; the class is mixed into the block's own.

    Attributes:
        placement: The placement of this layer.
        parts: Parts of the equation -> names of the block's children.
        factor: The number in the equation; NaN where there is none.
    """

    placement: Placement
    parts: Mapping[str, str]
    factor: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the equation; other arguments of the block go to the attention."""
        arguments = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        (_, x), *options = arguments.items()
        others = {name: value for name, value in options if name not in ("args", "kwargs")} | arguments.get("kwargs", {})
        parts = {name: getattr(self, child) for name, child in self.parts.items()}
        names = inspect.signature(parts["attention"].forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
        others = {name: value for name, value in others.items() if takes_any or name in names}

        def tensor_of(output: Any) -> Tensor:
            first = first_tensor(output)
            assert first is not None
            return first

        b = SimpleNamespace(**parts, factor=self.factor)
        b.attention = lambda X: tensor_of(parts["attention"](X, **others))
        b.feedforward = lambda X: tensor_of(parts["feedforward"](X))
        result: Tensor = self.placement.equation(b, x)
        return result


class NormedLinear(nn.Linear):
    """A linear layer of an attention with a norm of each head behind it; its weight keeps its name."""

    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the heads, each normalised."""
        heads = super().forward(x).unflatten(-1, (-1, self.norm.weight.numel()))  # type: ignore[operator, union-attr]
        return self.norm(heads).flatten(-2)  # type: ignore[no-any-return]


@checked(CALLER, leave=("inputs",))
def replace_norms(model: nn.Module, placement: str, inputs: Any) -> nn.Module:
    """Give the pre-norm blocks of a decoder or encoder another norm placement, in place, and return the model.

    All weights stay, under their names. An additional norm is a copy of the block's first one with gain 1 and bias 0; norms of
    queries, keys and values lie behind ``q_proj``, ``k_proj`` and ``v_proj``. Scales begin at their initial values. A norm
    that the placement does not use stays in the block without effect, and the norm before the head stays as it is.

    Args:
        model: A model whose blocks, found by :func:`hessiankit.depth_diagnostics`' rules, have an attention, a network and two
            norms, such as GPT-2, Llama, Mistral or Qwen of Hugging Face.
        placement: Name of ``hessiankit.blocks.PLACEMENTS``, such as ``"lns"``, ``"post"`` or ``"hybridnorm"``.
        inputs: Inputs for two calls, one unchanged and one with pre-norm equations, whose outputs must agree.

    Raises:
        InputError: The placement is unknown or needs what the blocks do not have, or they are not pre-norm.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> replace_norms(model, "lns", torch.ones(1, 3, 2))
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: replace_norms: block '0' is a Linear; expected two norms, an attention and a network
    """

    def run() -> Tensor:
        output = call(model, inputs)
        return first_tensor(output.to_tuple() if hasattr(output, "to_tuple") else output)  # type: ignore[return-value]

    with preserved_state(model), torch.no_grad():
        model.eval()
        stack = find_blocks(model, run)
        placements = [placement_of_layer(placement, k + 1, len(stack)) for k in range(len(stack))]
        parts = [_parts(name, block) for name, block in zip(stack.names, stack.modules, strict=True)]
        for name, block, of_block, one in zip(stack.names, stack.modules, parts, placements, strict=True):
            _check(name, getattr(block, of_block["attention"]), one)
        classes = [type(block) for block in stack.modules]
        reference = run()
        if not reference.numel():
            raise InputError(f"{CALLER}: the model's output on the inputs is empty; pass inputs with samples")
        try:
            for block, of_block in zip(stack.modules, parts, strict=True):
                _place(block, of_block, placement_of_layer("pre", 1, 1), 1, 1)
            difference = float((run() - reference).abs().max() / reference.abs().max())
            if not difference <= AGREEMENT:
                raise InputError(
                    f"{CALLER}: {classes[0].__name__} is not pre-norm: as x + attention(norm(x)), y + network(norm(y)) its model "
                    f"differs by {difference:.1e}; expected such blocks"
                )
        except BaseException:
            for block, block_class in zip(stack.modules, classes, strict=True):
                block.__class__ = block_class
                for attribute in ("placement", "parts", "factor"):
                    vars(block).pop(attribute, None)
            raise
    for k, (block, of_block, one) in enumerate(zip(stack.modules, parts, placements, strict=True)):
        _place(block, of_block, one, k + 1, len(stack))
    return model


def _parts(name: str, block: nn.Module) -> dict[str, str]:
    """Return the children of a block by their part in an equation: the first with linear layers is the attention."""
    if isinstance(block, TransformerBlock):
        raise InputError(f"{CALLER}: block {name!r} is a TransformerBlock of hessiankit; make it with placement=...")
    if isinstance(block, Replaced):
        raise InputError(f"{CALLER}: block {name!r} is {block.placement.name!r} already; begin with the model as it was")
    norms = [child for child, module in block.named_children() if is_norm(module)]
    remaining = [child for child, module in block.named_children() if any(is_linear(m) for m in module.modules())]
    if len(norms) != 2 or len(remaining) != 2:
        raise InputError(f"{CALLER}: block {name!r} is a {type(block).__name__}; expected two norms, an attention and a network")
    return {"attention": remaining[0], "feedforward": remaining[1], "norm_1": norms[0], "norm_2": norms[1]}


def _check(name: str, attention: nn.Module, placement: Placement) -> None:
    """Refuse placements for which a library's blocks lack a part."""
    projections = {letter: getattr(attention, f"{letter}_proj", None) for letter in placement.attention_norms}
    missing = [letter for letter, module in projections.items() if not isinstance(module, nn.Linear)]
    width = getattr(attention, "head_dim", None)
    if missing or (placement.attention_norms and not isinstance(width, int)) or placement.norm_scope != "head":
        raise InputError(
            f"{CALLER}: {placement.name!r} has norms inside the attention ({', '.join(placement.attention_norms)}), and that of "
            f"block {name!r}, a {type(attention).__name__}, has no place for them; expected q_proj, k_proj, v_proj and head_dim"
        )
    if placement.grouped or placement.embedding_norm:
        raise InputError(f"{CALLER}: {placement.name!r} changes more than the blocks' places of norms; take another placement")


def _place(block: nn.Module, parts: Mapping[str, str], placement: Placement, layer: int, n_layers: int) -> None:
    """Give a block the equation of a placement, with the norms and scales that it needs."""
    first, attention = getattr(block, parts["norm_1"]), getattr(block, parts["attention"])
    names = dict(parts)
    for number in placement.norms:
        if f"norm_{number}" not in names:
            names[f"norm_{number}"] = f"norm_{number}"
            block.add_module(f"norm_{number}", _fresh(first))
    for letter in placement.attention_norms:
        linear = getattr(attention, f"{letter}_proj")
        linear.__class__ = NormedLinear
        linear.norm = nn.RMSNorm(attention.head_dim, eps=_eps(first)).to(linear.weight)
    width = next(first.parameters())
    for scale in placement.scales:
        for number in (1, 2):
            initial = (
                torch.full_like(width, scale.initial(layer, n_layers))
                if scale.vector
                else width.new_tensor(scale.initial(layer, n_layers))
            )
            names[f"{scale.name}_{number}"] = f"{scale.name}_{number}"
            block.register_parameter(f"{scale.name}_{number}", nn.Parameter(initial.detach()))
    block.placement, block.parts = placement, names  # type: ignore[assignment]
    block.factor = float("nan") if placement.factor is None else placement.factor(layer, n_layers)  # type: ignore[assignment]
    if not isinstance(block, Replaced):
        block.__class__ = _replaced(type(block))  # type: ignore[arg-type]


@cache
def _replaced(kind: type) -> type:
    return type(f"Replaced{kind.__name__}", (Replaced, kind), {})


def _fresh(norm: nn.Module) -> nn.Module:
    """Return a copy of a norm with gain 1 and bias 0."""
    result = copy.deepcopy(norm)
    with torch.no_grad():
        for name, p in result.named_parameters():
            p.fill_(0.0 if name == "bias" else 1.0)
    return result


def _eps(norm: nn.Module) -> float:
    return float(next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)))
