"""Which parameter, or slice of a fused one, gets which ratio and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hessiankit.errors import InputError
from hessiankit.optim.ratios import Ratio
from hessiankit.parts import TYPES, Part

HIDDEN = ("QK", "VO", "FFN")
"""The types whose matrices Muon takes; embeddings, heads and vectors go to AdamW."""


@dataclass(frozen=True)
class Policy:
    """What decides a parameter's learning rate and weight decay.

    Attributes:
        ratios: Ratio by block type, for every type.
        muon_ratios: The same for the matrices that Muon takes; None where it takes none.
        lr: Learning rate at ratio 1.
        muon_lr: That of Muon.
        weight_decay: Of what decays.
        decay: ``"matrices"``, ``"all"`` or weight decay by block type.
        couple_decay: Whether r multiplies the shrinkage lr x weight decay.
    """

    ratios: Mapping[str, Ratio]
    muon_ratios: Mapping[str, Ratio] | None
    lr: float
    muon_lr: float
    weight_decay: float
    decay: str | Mapping[str, float]
    couple_decay: bool

    def decay_of(self, kind: str, p: nn.Parameter, ratio: float) -> float:
        """Return the weight decay of a parameter, or of a slice of it."""
        if not isinstance(self.decay, str) and kind in self.decay:
            decay = float(self.decay[kind])
        else:
            decay = self.weight_decay if self.decay == "all" or p.ndim >= 2 else 0.0
        return decay if self.couple_decay else decay / ratio


@dataclass(frozen=True)
class Assignment:
    """A parameter with everything but its companions: the values of the group that it belongs to.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        types: Its block types in the order of ``TYPES``; two or more for a fused parameter.
        values: lr, weight_decay, block_type, ratio, ...
        cuts: How the slices of a fused parameter differ; None where they do not.
    """

    name: str
    parameter: nn.Parameter
    types: tuple[str, ...]
    values: dict[str, Any]
    cuts: dict[str, Any] | None


def assign(name: str, p: nn.Parameter, parts: Iterable[Part], policy: Policy) -> Assignment:
    """Return the assignment of one parameter.

    A fused parameter gets the largest of its slices' ratios, so that the slices' own steps are its step times at most 1: in low
    precision the step that is rounded is the large one.
    """
    parts = tuple(parts)
    types = tuple(kind for kind in TYPES if any(part.type == kind for part in parts))
    takes_muon = policy.muon_ratios is not None and p.ndim == 2 and all(kind in HIDDEN for kind in types)
    ratios = policy.muon_ratios if takes_muon and policy.muon_ratios is not None else policy.ratios
    first = max(types, key=lambda kind: ratios[kind].value)
    base, ratio = policy.muon_lr if takes_muon else policy.lr, ratios[first]
    values: dict[str, Any] = {
        "lr": base * ratio.value,
        "weight_decay": policy.decay_of(first, p, ratio.value),
        "block_type": "+".join(types),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "base_lr": base,
        "expected_lr": base * ratio.value,
    }
    if policy.muon_ratios is not None:
        values["use_muon"] = takes_muon
    pieces = []
    for part in parts:
        own = ratios[part.type]
        piece = {
            "block_type": part.type,
            "ratio": own.value,
            "ratio_low": own.low,
            "ratio_high": own.high,
            "factor": own.value / ratio.value,
            "weight_decay": policy.decay_of(part.type, p, own.value),
        }
        pieces += [{**piece, "start": start, "stop": stop} for start, stop in part.segments]
    cuts = {"shape": list(p.shape), "axis": parts[0].axis, "pieces": pieces} if len(types) > 1 else None
    return Assignment(name, p, types, values, cuts)


def parts_by_parameter(model: nn.Module, parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the parts of every parameter.

    Raises:
        InputError: If a part is of no parameter of the model, or a parameter is not covered exactly once.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found: dict[str, list[Part]] = {name: [] for name in shapes}
    for part in parts:
        if part.parameter not in found:
            raise InputError(f"blockwise_lr: parts= has {part.name!r}, and the model has no parameter {part.parameter!r}.")
        found[part.parameter].append(part)
    for name, own in found.items():
        if not own:
            raise InputError(f"blockwise_lr: parts= has nothing of {name!r}; expected every parameter, or it is never trained.")
        if len(own) == 1 and own[0].axis is None:
            continue
        axes = {part.axis for part in own}
        cuts = sorted(segment for part in own for segment in part.segments)
        axis = axes.pop()
        ends = [0, *(stop for _, stop in cuts)]
        whole = axis is not None and not axes and ends[-1] == shapes[name][axis]
        if not whole or [start for start, _ in cuts] != ends[:-1]:
            raise InputError(
                f"blockwise_lr: {', '.join(part.name for part in own)} do not cover {name!r} of shape {tuple(shapes[name])} "
                "exactly once."
            )
    return found
