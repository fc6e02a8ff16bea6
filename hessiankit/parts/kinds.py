"""What kind of module holds a parameter: a lookup, a norm, or a linear map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hessiankit.blocks import GroupNorm

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase, GroupNorm)


def is_lookup(module: nn.Module) -> bool:
    """Tell whether a module looks rows of its weight up."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear map with a ``weight``: nn.Linear, a convolution, GPT-2's Conv1D, and their like."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim >= 2 and not is_lookup(module) and not isinstance(module, _NORMS)


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalises: torch's norms by class, others by what they compute.

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
    once, scaled, turned = (_forward(module, x) for x in (2 * rows, 32 * rows, -2 * rows))
    if once is None or scaled is None or turned is None:
        return False
    same = (once - scaled).abs().max() <= 1e-2 * once.abs().max()
    return bool(same) and bool((once - turned).abs().max() > 0)  # and it is no constant


def is_scale(module: nn.Module) -> bool:
    """Tell whether a module multiplies the entries of a row by a vector of its own, and does nothing else: LayerScale.

    >>> layer = nn.Module()
    >>> layer.gamma, layer.forward = nn.Parameter(torch.tensor([2.0, 3.0])), lambda x: x * layer.gamma
    >>> is_scale(layer), is_scale(nn.LayerNorm(3))
    (True, False)
    """
    rows = _rows_of(module)
    if rows is None or len(list(module.parameters())) != 1:
        return False
    found = _forward(module, rows)
    return found is not None and torch.equal(found, rows * next(module.parameters()))


def _rows_of(module: nn.Module) -> Tensor | None:
    """Return rows to try a module on, if it has no children and its parameters are vectors of one length."""
    own = list(module.parameters())
    if not own or next(module.children(), None) is not None or own[0].is_meta or not own[0].is_floating_point():
        return None
    if any(p.ndim != 1 or p.shape != own[0].shape for p in own):
        return None
    row = torch.linspace(-1.0, 2.0, own[0].shape[0], device=own[0].device, dtype=own[0].dtype)
    return torch.stack([row, row.square()])


def _forward(module: nn.Module, rows: Tensor) -> Tensor | None:
    """Return what a module makes of some rows, or None if it makes no rows of them."""
    try:
        with torch.no_grad():  # forward, not the call: the user's hooks shall not notice
            found = module.forward(rows)
    except Exception:  # whatever another library raises: it is no map of rows
        return None
    return found if isinstance(found, Tensor) and found.shape == rows.shape else None
