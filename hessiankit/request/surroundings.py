"""What a call finds around it in torch: contexts under which a Hessian would not be that of the module's own loss."""

from __future__ import annotations

import torch
from torch import nn

from hessiankit.errors import InputError


def check_surroundings(who: str, module: nn.Module) -> None:
    """Refuse contexts in which torch computes something else than outside, or puts tensors elsewhere.

    Raises:
        InputError: Within ``torch.autocast``, a transform of ``torch.func``, or under a default device other than the module's.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise InputError(
            f"{who}: called within a transform of torch.func (vmap, grad, jvp ...), whose tensors have no values of their own; "
            "call it outside, once for each sample"
        )
    first = next(module.parameters(), None)
    here = torch.device("cpu") if first is None else first.device
    kinds = [kind for kind in dict.fromkeys((here.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    lowered = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
    if lowered is not None:
        raise InputError(
            f"{who}: called within torch.autocast({lowered!r}, {torch.get_autocast_dtype(lowered)}), which would lower the "
            "precision of the derivatives too; call it outside, on a module in one dtype"
        )
    given = torch.get_default_device()
    if first is not None and given.type not in (here.type, "cpu"):
        raise InputError(
            f"{who}: torch's default device is {given} (torch.device as a context, or set_default_device), but the parameters "
            f"are on {here}, and tensors made on the way would lie apart; call it within torch.device({str(here)!r})"
        )
