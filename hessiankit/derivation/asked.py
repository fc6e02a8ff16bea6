"""What ``derive`` is asked for, checked: names of parameters, one sequence of tokens, a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.derivation.symbols import index_of, symbol_of
from hessiankit.errors import InputError, unknown
from hessiankit.request.validation import one_kind

ALIASES = {
    "query": "attention.W_Q",
    "key": "attention.W_K",
    "value": "attention.W_V",
    "output": "attention.W_O",
    "up": "feedforward.W_1",
    "down": "feedforward.W_2",
    "gate": "feedforward.W_G",
    "input": "X",
}
"""What the parameters are called in words; their dotted names and the papers' letters (Q, W_Q, 1, ...) work too."""
LOSSES = ("mse", "cross_entropy")


def asked_block(block: object) -> TransformerBlock:
    """Return the block.

    Raises:
        InputError: If its parameters are of several dtypes or not finite, or if it is something else; for a model that is made
            of blocks, how to reach them.
    """
    if isinstance(block, TransformerBlock):
        one_kind("derive", block, dict(block.named_parameters()))
        return block
    got = type(block).__name__
    if isinstance(block, nn.Module) and any(isinstance(part, TransformerBlock) for part in block.modules()):
        where = next(name for name, part in block.named_modules() if isinstance(part, TransformerBlock))
        dotted, _, number = where.rpartition(".")
        path = f"{dotted}[{number}]" if number.isdigit() else where
        raise InputError(f"derive: a {got} is a stack, and a formula is of one block; pass one of them, such as model.{path}")
    raise InputError(f"derive: expected a hessiankit.TransformerBlock, got {got}; build one and pass it")


def asked_names(block: TransformerBlock, wrt: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dotted names of the parameters that were asked for, "X" for the input.

    Raises:
        InputError: If there are not one or two, or one is not known (with the nearest names).
    """
    if not isinstance(wrt, (str, list, tuple)):
        raise InputError(f"derive: wrt is a {type(wrt).__name__}; expected a name, or a list of one or two names")
    chosen = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    if not 1 <= len(chosen) <= 2 or not all(isinstance(name, str) for name in chosen):
        raise InputError(f"derive: wrt={wrt!r} is not one or two names; pass one for a Jacobian, two for a Hessian block")
    return tuple(_name(block, name) for name in chosen)


def _name(block: TransformerBlock, name: str) -> str:
    if name in ("X", "input"):
        return "X"
    known = [n for n, _ in block.named_parameters()]
    for candidate in known:
        symbol = symbol_of(candidate)
        if name in (candidate, symbol, symbol.lstrip("\\"), index_of(symbol)) or ALIASES.get(name) == candidate:
            return candidate
    words = [word for word, target in ALIASES.items() if target in known]
    raise unknown("derive", "wrt", name, [*words, *known, "X"])


def sequence(block: TransformerBlock, inputs: Tensor | None, length: int, seed: int) -> Tensor:
    """Return one sequence (L, d_model), drawn where none is given, in the arithmetic of the block.

    Raises:
        InputError: If it is not a finite floating-point tensor of this shape, or the length is not positive.
    """
    like = next(iter(block.parameters()))
    if inputs is None:
        if length < 1:
            raise InputError(f"derive: length={length}, expected at least 1")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, block.d_model, generator=generator, dtype=torch.float64).to(like)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = getattr(inputs, "dtype", type(inputs).__name__)
        raise InputError(f"derive: inputs are {got}; pass a tensor of floating point, (L, {block.d_model})")
    X = inputs[0] if inputs.ndim == 3 and inputs.shape[0] == 1 else inputs
    if X.ndim != 2 or X.shape[1] != block.d_model or not X.shape[0]:
        raise InputError(
            f"derive: inputs have shape {tuple(inputs.shape)}; a formula is of one sequence, so pass (L, {block.d_model})"
        )
    if not bool(torch.isfinite(X).all()):
        raise InputError("derive: inputs hold NaN or infinite entries; pass finite numbers")
    return X.detach().to(like)


def target_of(loss: str | None, target: Tensor | None, X: Tensor, seed: int) -> Any:
    """Return what the output is compared with, drawn where nothing is given: an array like X, labels, or None.

    Raises:
        InputError: If the loss is not known, there is a target without a loss, or the target does not fit.
    """
    length, d = X.shape
    if loss is None:
        if target is not None:
            raise InputError("derive: there is a target and no loss; pass loss='mse' or 'cross_entropy', or drop target=")
        return None
    if loss not in LOSSES:
        raise unknown("derive", "loss", loss, LOSSES)
    if target is not None and not isinstance(target, Tensor):
        raise InputError(f"derive: the target is a {type(target).__name__}; pass a tensor")
    generator = torch.Generator().manual_seed(seed + 1)
    if loss == "mse":
        if target is None:
            return torch.randn(length, d, generator=generator, dtype=torch.float64).to(X)
        goal = target[0] if target.ndim == 3 and target.shape[0] == 1 else target
        if goal.shape != X.shape or not goal.is_floating_point() or not bool(torch.isfinite(goal).all()):
            got = f"{target.dtype} {tuple(target.shape)}"
            raise InputError(f"derive: the target is {got}; mse needs finite numbers of shape {tuple(X.shape)}")
        return goal.detach().to(X)
    labels = torch.randint(d, (length,), generator=generator) if target is None else target.reshape(-1)
    if labels.numel() != length or labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"derive: the target is {labels.dtype} {tuple(labels.shape)}; cross_entropy needs {length} integers, one a token"
        )
    if not bool(((labels >= 0) & (labels < d)).all()):
        raise InputError(
            f"derive: labels run from {int(labels.min())} to {int(labels.max())}; cross_entropy compares {d} logits a token, "
            f"so pass labels from 0 to {d - 1}"
        )
    return labels.tolist()
