"""Parameter groups with one learning rate for each block type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import nn

from hessiankit.arguments import checked
from hessiankit.errors import InputError
from hessiankit.optim.assignment import Assignment, Policy, assign, parts_by_parameter
from hessiankit.optim.guard import MODES
from hessiankit.optim.hooks import watch
from hessiankit.optim.measured import CAP, POWER, measured_ratios
from hessiankit.optim.names import remember
from hessiankit.optim.parameter_groups import ParameterGroups
from hessiankit.optim.ratios import Ratio, by_type, preset
from hessiankit.parts import TYPES, Part, model_parts

if TYPE_CHECKING:
    from hessiankit.estimation import SharpnessReport

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adam_mini", "muon")


@checked("blockwise_lr", leave=("muon_lr",), rest=model_parts)
def blockwise_lr(
    model: nn.Module,
    lr: float,
    ratios: str | Mapping[str, float | Ratio] = "paper",
    *,
    optimizer: str = "adamw",
    muon_lr: float | None = None,
    weight_decay: float = 0.1,
    decay: str | Mapping[str, float] = "matrices",
    couple_decay: bool = True,
    head_ratio: float | None = None,
    sharpness: SharpnessReport | None = None,
    power: float = POWER,
    cap: float = CAP,
    parts: Iterable[Part] | None = None,
    guard: str = "raise",
    **policy: Any,
) -> ParameterGroups:
    r"""Return parameter groups with the learning rate :math:`\eta_t = r(t)\,\eta` for every block type t.

    *The Sharpness Disparity Principle* (Wang et al.), Sec. 5 and Eq. 5. One group for each block type and weight decay; every
    trainable parameter is in exactly one. A fused parameter (query, key and value in one tensor) is a parameter of its group
    with the largest of its slices' rates; the steps of the other slices are rescaled after every step of whatever optimizer
    holds the group, :math:`\theta + f\,(\theta' - \theta)`, which for an optimizer that treats entries alone (AdamW, Lion, SGD,
    ...) is the same as splitting the tensor (claim F3). Nothing has to be attached for that.

    Args:
        model: The model; its type of parameter by :func:`hessiankit.parts.model_parts`.
        lr: The base rate: that of the norms.
        ratios: A preset's name (``hessiankit.optim.PRESETS``; ``"paper"`` is Eq. 5, for Adam-mini that of Sec. 6.3), a mapping
            from block type to ratio (1 where it has none), or ``"measured"``. With Muon, names concern AdamW's groups only.
        optimizer: What the groups are for: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"lion"``, ``"adam_mini"`` (one group a
            parameter, with its ``name``), ``"muon"`` (``groups.muon`` and ``groups.adamw``).
        muon_lr: The rate of Muon's groups; ``lr`` where it is not given.
        weight_decay: Of the parameters that decay.
        decay: ``"matrices"``: those with two axes or more; ``"all"``: all, as in the paper's released code; or the weight decay
            by block type, of all parameters of that type (others as with ``"matrices"``).
        couple_decay: Decoupled weight decay shrinks by lr x decay, so that r multiplies it. True leaves it so, as the released
            code does; False divides the decay by r.
        head_ratio: Ratio of an untied head. Where it is not given: 1 with a preset (the released code's default; the paper is
            silent), or as measured.
        sharpness: The report behind ``"measured"``.
        power: Exponent of S_Norm / S (:func:`~hessiankit.optim.measured_ratios`).
        cap: Largest measured ratio; its inverse is the smallest.
        parts: The parts of the model, where they are at hand.
        guard: What a step does when the rates are no longer r times a common rate: ``"raise"``, ``"warn"`` or ``"off"``.
        **policy: Options of ``model_parts``: ``overrides``, ``biases``, ``final_norm``, ``tied``, ``inputs``.

    Raises:
        InputError: If an option cannot be used, a type has no ratio, or a parameter is not covered by the parts exactly once.

    >>> from hessiankit.blocks import TransformerBlock
    >>> block = TransformerBlock(d_model=4, d_ff=5, d_k=4)
    >>> for group in blockwise_lr(block, 1e-3):
    ...     print(group["block_type"], group["lr"], group["weight_decay"], len(group["params"]))
    QK 0.008 0.1 2
    VO 0.004 0.1 1
    FFN 0.006 0.1 2
    Norm 0.001 0.0 4
    """
    optimizer = _checked(lr, optimizer, muon_lr, weight_decay, decay, guard)
    if parts is not None and policy:
        raise InputError(f"blockwise_lr: parts= and {next(iter(policy))}= both; the parts are decided, leave one out.")
    by_parameter = parts_by_parameter(model, model_parts(model, **policy) if parts is None else parts)
    title, found, covers = _ratios(ratios, optimizer, sharpness, power, cap)
    if head_ratio is not None:
        found["Head"] = by_type({"Head": head_ratio})["Head"]
        covers |= {"Head"}
    muon_ratios = None if optimizer != "muon" else by_type({}) if isinstance(ratios, str) else found
    rule = Policy(
        found, muon_ratios, float(lr), float(lr if muon_lr is None else muon_lr), float(weight_decay), decay, couple_decay
    )
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError("blockwise_lr: no parameter of the model requires a gradient; there is nothing to train.")
    assigned = [assign(name, p, by_parameter[name], rule) for name, p in trainable]
    for kind in dict.fromkeys(kind for a in assigned for kind in a.types):
        if kind not in covers:
            raise InputError(
                f"blockwise_lr: the report has no {kind!r}, which the model has; measure with the same parts, or give "
                f"{{**measured_ratios(report), {kind!r}: ...}} as ratios."
            )
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return ParameterGroups(_groups(assigned, guard, optimizer == "adam_mini"), title=f"{title}, base lr {lr:g}", frozen=frozen)


def _checked(
    lr: float, optimizer: str, muon_lr: float | None, weight_decay: float, decay: str | Mapping[str, float], guard: str
) -> str:
    """Return the optimizer's name after a look at the plain options."""
    for name, value in {"lr": lr, "muon_lr": lr if muon_lr is None else muon_lr, "weight_decay": weight_decay}.items():
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise InputError(f"blockwise_lr: {name}={value}; expected a number of at least 0.")
    name = optimizer.lower().replace("-", "_")
    if name == "lbfgs":
        raise InputError("blockwise_lr: optimizer='lbfgs' has one rate for all parameters, and its step is not linear in it.")
    if name not in OPTIMIZERS:
        raise InputError(
            f"blockwise_lr: optimizer={optimizer!r}; expected one of {', '.join(OPTIMIZERS)}; another one that reads its groups' "
            "lr and weight_decay is served by 'adamw'."
        )
    if muon_lr is not None and name != "muon":
        raise InputError(f"blockwise_lr: muon_lr= is for optimizer='muon', not {optimizer!r}.")
    if isinstance(decay, str) and decay not in ("matrices", "all"):
        raise InputError(f"blockwise_lr: decay={decay!r}; expected 'matrices', 'all' or a mapping from block type to number.")
    if not isinstance(decay, str):
        for kind, value in decay.items():
            if kind not in TYPES or not (math.isfinite(value) and value >= 0):
                raise InputError(f"blockwise_lr: decay={{{kind!r}: {value}}}; expected block types and numbers of at least 0.")
    if guard not in MODES:
        raise InputError(f"blockwise_lr: guard={guard!r}; expected one of {', '.join(MODES)}.")
    return name


def _ratios(
    ratios: str | Mapping[str, float | Ratio], optimizer: str, sharpness: SharpnessReport | None, power: float, cap: float
) -> tuple[str, dict[str, Ratio], set[str]]:
    """Return (a title, a ratio for every type, the types that these ratios are meant for)."""
    if ratios == "measured":
        if sharpness is None:
            raise InputError("blockwise_lr: ratios='measured' needs sharpness=, a report of hessiankit.estimation.sharpness.")
        measured = measured_ratios(sharpness, power=power, cap=cap)
        return f"ratios measured: (S_Norm / S)^{power:g} within [{1 / cap:.3g}, {cap:g}]", by_type(measured), set(measured)
    if sharpness is not None:
        raise InputError("blockwise_lr: sharpness= is for ratios='measured'.")
    if isinstance(ratios, str):
        name, table = preset(ratios, optimizer)
        return f"ratios {name!r}", by_type(table), set(TYPES)
    return "ratios given", by_type(ratios), set(TYPES)


def _groups(assigned: Iterable[Assignment], guard: str, one_each: bool) -> list[dict[str, Any]]:
    """Return the groups, in the order of the block types, fused ones last."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for a in assigned:
        places = tuple(TYPES.index(kind) for kind in a.types)
        order = (len(places) > 1, places, -a.values["weight_decay"])
        key = (order, a.values.get("use_muon"), a.name if one_each else "")
        if key not in groups:
            groups[key] = {"params": [], "param_names": [], **a.values, "guard": guard}
            if one_each:
                groups[key]["name"] = a.name
            if a.cuts:
                groups[key]["slices"] = []
        groups[key]["params"].append(a.parameter)
        groups[key]["param_names"].append(a.name)
        if a.cuts:
            groups[key]["slices"].append(a.cuts)
        remember(a.parameter, a.name)
    watch()
    if one_each:
        return list(groups.values())
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]
