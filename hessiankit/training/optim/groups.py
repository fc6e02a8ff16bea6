"""Parameter groups with one learning rate for each block type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.training.optim.ratios import CAP, POWER, PRESETS, Ratio, by_type, measured_ratios
from hessiankit.training.optim.steps import MODES, NAMES
from hessiankit.training.partition import TYPES, Part, model_parts

MUON_TYPES = ("QK", "VO", "FFN")
"""The types whose matrices Muon takes; embeddings, heads and vectors go to AdamW."""


@dataclass(frozen=True)
class RatePolicy:
    """Learning rates and weight decays by block type; the fields are arguments of :func:`blockwise_lr`."""

    ratios: Mapping[str, Ratio]  # for every type
    muon_ratios: Mapping[str, Ratio] | None  # for the matrices that Muon takes; None where it takes none
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


def group_of(name: str, p: nn.Parameter, parts: Iterable[Part], policy: RatePolicy) -> dict[str, Any]:
    """Return the group of one parameter; ``slices`` holds how those of a fused one differ.

    A fused parameter gets the largest of its slices' ratios: in low precision the step that is rounded is the large one.
    """
    parts = tuple(parts)
    types = tuple(kind for kind in TYPES if any(part.type == kind for part in parts))
    takes_muon = policy.muon_ratios is not None and p.ndim == 2 and all(kind in MUON_TYPES for kind in types)
    ratios = policy.muon_ratios if takes_muon and policy.muon_ratios is not None else policy.ratios
    first = max(types, key=lambda kind: ratios[kind].value)
    base, ratio = policy.muon_lr if takes_muon else policy.lr, ratios[first]
    group: dict[str, Any] = {
        "params": [p],
        "param_names": [name],
        "lr": base * ratio.value,
        "weight_decay": policy.decay_of(first, p, ratio.value),
        "block_type": "+".join(types),
        **_keys(ratio),
        "base_lr": base,
        "expected_lr": base * ratio.value,
    }
    if policy.muon_ratios is not None:
        group["use_muon"] = takes_muon
    if len(types) == 1:
        return group
    pieces = []
    for part in parts:
        piece_ratio = ratios[part.type]
        decay = policy.decay_of(part.type, p, piece_ratio.value)
        piece = {"block_type": part.type, **_keys(piece_ratio), "factor": piece_ratio.value / ratio.value, "weight_decay": decay}
        pieces += [{**piece, "start": start, "stop": stop} for start, stop in part.segments]
    return {**group, "slices": [{"shape": list(p.shape), "axis": parts[0].axis, "pieces": pieces}]}


def _keys(ratio: Ratio) -> dict[str, float | None]:
    return {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}


def parts_by_parameter(model: nn.Module, parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the parts of every parameter, each of which they have to cover exactly once."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parts_of: dict[str, list[Part]] = {name: [] for name in shapes}
    for part in parts:
        if part.parameter not in parts_of:
            raise InputError(f"blockwise_lr: parts= has {part.name!r}, and the model has no parameter {part.parameter!r}.")
        check_name("blockwise_lr", f"type of part {part.name!r}", part.type, TYPES)
        parts_of[part.parameter].append(part)
    for name, pieces in parts_of.items():
        if not pieces:
            raise InputError(f"blockwise_lr: parts= has nothing of {name!r}; expected every parameter, or it is never trained.")
        if len(pieces) == 1 and pieces[0].axis is None:
            continue
        axes = {part.axis for part in pieces}
        axis = axes.pop()
        length = shapes[name][axis] if axis is not None and 0 <= axis < len(shapes[name]) else 0
        cuts = [segment for part in pieces for segment in part.segments]
        places = sorted(at for start, stop in cuts for at in range(start, stop))
        if axes or not places or places != list(range(length)) or not all(start < stop for start, stop in cuts):
            raise InputError(
                f"blockwise_lr: {', '.join(part.name for part in pieces)} do not cover {name!r} of shape {tuple(shapes[name])} "
                "exactly once."
            )
    return parts_of


HEADERS = ("block type", "tensors", "entries", "ratio", "interval", "lr", "weight decay", "lr x decay")
_ALIGNED = ("param_names", "slices")
AT_THAT_STEP = "sharpness at initialisation is not that of training: for these ratios, measure it after the warm-up"


class ParameterGroups(Printed, list[dict[str, Any]]):
    """Parameter groups, as ``torch.optim.AdamW(groups)`` takes them, that print as a table.

    Keys of a group: ``params`` and ``param_names``; ``lr`` and ``weight_decay``; ``block_type`` (``"QK+VO"`` for fused
    parameters) and ``ratio``, with ``ratio_low`` and ``ratio_high`` where it was measured; ``base_lr``, the rate at ratio 1;
    ``expected_lr`` and ``guard``, for :func:`~hessiankit.training.optim.check_groups`; ``slices`` for fused parameters;
    ``use_muon`` for Muon; ``name`` for Adam-mini. All are numbers, strings and lists, which
    ``torch.load(weights_only=True)`` takes.

    Attributes:
        title: Source of the ratios.
        frozen: Names of the parameters that need no gradient and are in no group.
    """

    def __init__(self, groups: Iterable[dict[str, Any]] = (), *, title: str = "", frozen: tuple[str, ...] = ()) -> None:
        super().__init__(groups)
        self.title, self.frozen = title, frozen

    @property
    def muon(self) -> ParameterGroups:
        """The groups that Muon takes, as ``torch.optim.Muon(groups.muon)`` does."""
        return self._those(True)

    @property
    def adamw(self) -> ParameterGroups:
        """The groups that Muon does not take, for ``torch.optim.AdamW(groups.adamw)``."""
        return self._those(False)

    def _those(self, muon: bool) -> ParameterGroups:
        return ParameterGroups((g for g in self if g.get("use_muon", False) is muon), title=self.title, frozen=self.frozen)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of every group, as Adam-mini takes them."""
        for group in self:
            yield from zip(group["param_names"], group["params"], strict=True)

    def bare(self) -> list[dict[str, Any]]:
        """Return new groups with params, lr, weight_decay and use_muon alone, for an optimizer that refuses other keys.

        ``MuonWithAuxAdam`` of the reference implementation does; :meth:`apply` gives its groups the rest afterwards.
        """
        keys = ("lr", "weight_decay", "use_muon")
        return [{"params": list(g["params"]), **{key: g[key] for key in keys if key in g}} for g in self]

    def apply(self, optimizer: Optimizer) -> Optimizer:
        """Write rates, decay and slices into the groups that an optimizer has made itself, and return it.

        For optimizers that take parameters or named parameters and not groups (Adam-mini), and for :meth:`bare`. Call it before
        a scheduler is made.

        Raises:
            InputError: If a group of the optimizer mixes parameters of two groups, or the parameters are not the same.

        >>> model = nn.Linear(2, 3)
        >>> weight, bias = model.parameters()
        >>> rates = [{"params": [p], "lr": lr, "param_names": [n]} for p, lr, n in ((weight, 0.2, "weight"), (bias, 0.1, "bias"))]
        >>> optimizer = Optimizer([{"params": [bias]}, {"params": [weight]}], {})
        >>> [group["lr"] for group in ParameterGroups(rates).apply(optimizer).param_groups]
        [0.1, 0.2]
        """
        place = {id(p): (k, i) for k, g in enumerate(self) for i, p in enumerate(g["params"])}
        names = {id(p): name for name, p in self.named_parameters()}
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        surplus = sum(id(p) not in place for p in parameters)
        absences = [names[i] for i in place if i not in {id(p) for p in parameters}]
        if surplus or absences:
            fault = f"{surplus} parameters that are in no group" if surplus else f"no {absences[0]!r}"
            raise InputError(f"apply: the {type(optimizer).__name__} has {fault}; expected the parameters that the groups have.")
        for group in optimizer.param_groups:
            sources = {place[id(p)][0] for p in group["params"]}
            if len(sources) > 1:
                kinds = " and ".join(sorted({self[k]["block_type"] for k in sources}))
                raise InputError(
                    f"apply: a group of the {type(optimizer).__name__} mixes parameters of {kinds} that need their own rates or "
                    "decay; expected each of its groups within one of these; build it from groups.bare(), or with one group a "
                    "parameter."
                )
            source, order = self[sources.pop()], [place[id(p)][1] for p in group["params"]]
            for key in source.keys() - {"params", "name"}:
                group[key] = [source[key][i] for i in order] if key in _ALIGNED else source[key]
        return optimizer

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows, with the types of a fused group below it."""
        rows = []
        for g in self:
            entries = sum(p.numel() for p in g["params"])
            muon = " (Muon)" if g.get("use_muon") else ""
            rows.append(_row(g["block_type"] + muon, str(len(g["params"])), entries, g, float(g["lr"])))
            slices = g.get("slices", ())
            for kind in dict.fromkeys(piece["block_type"] for cuts in slices for piece in cuts["pieces"]):
                pairs = [(cuts, piece) for cuts in slices for piece in cuts["pieces"] if piece["block_type"] == kind]
                shares = [(piece["stop"] - piece["start"]) / cuts["shape"][cuts["axis"]] for cuts, piece in pairs]
                entries = round(sum(share * math.prod(cuts["shape"]) for share, (cuts, _) in zip(shares, pairs, strict=True)))
                rows.append(_row(f"  {kind}, slices", "", entries, pairs[0][1], float(g["lr"]) * pairs[0][1]["factor"]))
        return rows

    def _headline(self) -> str:
        return f"{len(self)} groups" + (f"; {self.title}" if self.title else "")

    def _parts(self) -> Iterator[Piece]:
        yield table(HEADERS, self.rows(), title=self.title, drop=("lr x decay", "tensors", "interval", "entries"))
        if any(g.get("ratio_low") is not None for g in self):
            yield AT_THAT_STEP
        if self.frozen:
            yield f"frozen, in no group: {', '.join(self.frozen)}"


def _row(kind: str, tensors: str, entries: int, values: dict[str, Any], lr: float) -> tuple[str, ...]:
    low, high, decay = values["ratio_low"], values["ratio_high"], float(values["weight_decay"])
    interval = "" if low is None else f"[{low:.3g}, {high:.3g}]"
    return kind, tensors, f"{entries:,}", f"{values['ratio']:.3g}", interval, f"{lr:.3g}", f"{decay:.3g}", f"{lr * decay:.3g}"


OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adam_mini", "muon")


@checked("blockwise_lr", leave=("muon_lr",), rest=model_parts, sharded=True)
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
    sharpness: Any = None,
    power: float = POWER,
    cap: float = CAP,
    parts: Iterable[Part] | None = None,
    guard: str = "raise",
    **policy: Any,
) -> ParameterGroups:
    r"""Return parameter groups with the learning rate :math:`\eta_t = r(t)\,\eta` for every block type t.

    *The Sharpness Disparity Principle* (Wang et al.), Sec. 5 and Eq. 5. One group for each block type and weight decay; every
    trainable parameter is in exactly one. A fused parameter (query, key and value in one tensor) is in the group with the
    largest of its slices' rates; the steps of the other slices are rescaled after every step of whatever optimizer holds the
    group, :math:`\theta + f\,(\theta' - \theta)`, which for an optimizer that treats entries alone (AdamW, Lion, SGD, ...) is
    the same as splitting the tensor (sharpness-disparity/fused). No hook has to be attached.

    Args:
        model: The model; its type of parameter by :func:`hessiankit.training.partition.model_parts`.
        lr: The base rate: that of the norms.
        ratios: A preset's name (``hessiankit.training.optim.PRESETS``; ``"paper"`` is Eq. 5, for Adam-mini that of Sec. 6.3), a
            mapping from block type to ratio (1 where it has none), or ``"measured"``. With Muon, names concern AdamW's groups
            only.
        optimizer: The optimizer of the groups: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"lion"``, ``"adam_mini"`` (one group a
            parameter, with its ``name``), ``"muon"`` (``groups.muon`` and ``groups.adamw``).
        muon_lr: The rate of Muon's groups; by default ``lr``.
        weight_decay: Weight decay of the parameters that decay.
        decay: ``"matrices"``: those with two axes or more; ``"all"``: all, as in the paper's released code; or the weight decay
            by block type, of all parameters of that type (others as with ``"matrices"``).
        couple_decay: Decoupled weight decay shrinks by lr x decay, so that r multiplies it. True leaves it so, as the released
            code does; False divides the decay by r.
        head_ratio: Ratio of an untied head; by default 1 with a preset, as in the released code, or as measured.
        sharpness: The report behind ``"measured"``. Measure it after the warm-up, where the paper switches to several rates:
            sharpness at initialisation is not that of training.
        power: Exponent of S_Norm / S (:func:`~hessiankit.training.optim.measured_ratios`).
        cap: Largest measured ratio; its inverse is the smallest.
        parts: The parts of the model, where they are at hand.
        guard: Action of a step whose rates are not r times a common rate: ``"raise"``, ``"warn"`` or ``"off"``.
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
    title, factors, covers = _ratios(ratios, optimizer, sharpness, power, cap)
    if head_ratio is not None:
        factors["Head"] = by_type({"Head": head_ratio})["Head"]
        covers |= {"Head"}
    muon_ratios = None if optimizer != "muon" else by_type({}) if isinstance(ratios, str) else factors
    rule = RatePolicy(
        factors, muon_ratios, float(lr), float(lr if muon_lr is None else muon_lr), float(weight_decay), decay, couple_decay
    )
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError("blockwise_lr: no parameter of the model requires a gradient; there is nothing to train.")
    groups = [group_of(name, p, by_parameter[name], rule) for name, p in trainable]
    for kind in dict.fromkeys(kind for group in groups for kind in group["block_type"].split("+")):
        if kind not in covers:
            raise InputError(
                f"blockwise_lr: the report has no {kind!r}, which the model has; measure with the same parts, or give "
                f"{{**measured_ratios(report), {kind!r}: ...}} as ratios."
            )
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    for name, p in trainable:
        NAMES[p] = name
    merged_groups = _merged(groups, guard, is_separate=optimizer == "adam_mini")
    return ParameterGroups(merged_groups, title=f"{title}, base lr {lr:g}", frozen=frozen)


def _checked(
    lr: float, optimizer: str, muon_lr: float | None, weight_decay: float, decay: str | Mapping[str, float], guard: str
) -> str:
    """Return the optimizer's name after checks of the options."""
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
    check_name("blockwise_lr", "guard", guard, MODES)
    return name


def _ratios(
    ratios: str | Mapping[str, float | Ratio], optimizer: str, sharpness: Any, power: float, cap: float
) -> tuple[str, dict[str, Ratio], set[str]]:
    """Return (a title, a ratio for every type, the types that these ratios are meant for)."""
    if ratios == "measured":
        if sharpness is None:
            raise InputError("blockwise_lr: ratios='measured' needs sharpness=, a report of hessiankit.sharpness.")
        factors = measured_ratios(sharpness, power=power, cap=cap)
        return f"ratios measured: (S_Norm / S)^{power:g} within [{1 / cap:.3g}, {cap:g}]", by_type(factors), set(factors)
    if sharpness is not None:
        raise InputError("blockwise_lr: sharpness= is for ratios='measured'.")
    if not isinstance(ratios, str):
        return "ratios given", by_type(ratios), set(TYPES)
    name = "adam-mini" if ratios == "paper" and optimizer == "adam_mini" else ratios
    if name not in PRESETS:
        raise InputError(
            f"blockwise_lr: ratios={name!r} is no preset; expected one of {', '.join(PRESETS)}, 'measured', or a mapping from "
            "block type to ratio."
        )
    return f"ratios {name!r}", by_type(PRESETS[name]), set(TYPES)


def _merged(groups: Iterable[dict[str, Any]], guard: str, *, is_separate: bool) -> list[dict[str, Any]]:
    """Return one group for each block type and weight decay, in the order of the block types, fused ones last.

    With ``is_separate`` every parameter remains in a group of its own, with its ``name``, in the order of the model.
    """
    if is_separate:
        return [{**group, "guard": guard, "name": group["param_names"][0]} for group in groups]
    groups_by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        places = tuple(TYPES.index(kind) for kind in group["block_type"].split("+"))
        key = ((len(places) > 1, places, -group["weight_decay"]), group.get("use_muon"))
        if key not in groups_by_key:
            groups_by_key[key] = {**group, "guard": guard}
            continue
        for name in ("params", *_ALIGNED):
            if name in group:
                groups_by_key[key][name] += group[name]
    return [groups_by_key[key] for key in sorted(groups_by_key, key=lambda key: key[0])]
