"""Which parameter had which name, so that a state dict of another model or order is noticed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from hessiankit.errors import InputError

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_seen: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()


def remember(p: nn.Parameter, name: str) -> None:
    """Keep a parameter's name as long as the parameter lives."""
    _names[p] = name


def check_names(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a group's names are not those that its parameters had when the groups were made.

    torch pairs the groups of a loaded state dict with the optimizer's by position alone. The lists of names are compared when
    they are new, which after ``load_state_dict`` they are; names of wrappers (torch.compile, DDP) do not count.

    Raises:
        InputError: If they differ; with the first parameter that does.
    """
    lists = [group["param_names"] for group in groups if "param_names" in group]
    before = _seen.get(optimizer, [])
    if len(before) == len(lists) and all(a is b for a, b in zip(before, lists, strict=True)):
        return
    for group in groups:
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            own = _names.get(p, name)
            if _plain(own) != _plain(name):
                raise InputError(
                    f"blockwise_lr: the groups of {type(optimizer).__name__} say {name!r} ({group['block_type']}) where the "
                    f"parameter is {own!r}; expected the same model in the same order; the state dict "
                    "that was loaded is of other groups."
                )
    _seen[optimizer] = lists


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)
