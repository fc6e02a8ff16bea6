"""Parameter groups that print as a table and fit every kind of optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hessiankit.errors import InputError
from hessiankit.tables import Piece, Printed, table

HEADERS = ("block type", "tensors", "entries", "ratio", "interval", "lr", "weight decay", "lr x decay")
_ALIGNED = ("param_names", "slices")
_KEYS = (
    *("lr", "weight_decay", "block_type", "ratio", "ratio_low", "ratio_high", "base_lr", "expected_lr"),
    *("use_muon", "guard", "param_names", "slices"),
)


class ParameterGroups(Printed, list[dict[str, Any]]):
    """Parameter groups, as ``torch.optim.AdamW(groups)`` takes them, that print as a table.

    Keys of a group: ``params`` and ``param_names``; ``lr`` and ``weight_decay``; ``block_type`` (``"QK+VO"`` for fused
    parameters) and ``ratio``, with ``ratio_low`` and ``ratio_high`` where it was measured; ``base_lr``, the rate at ratio 1;
    ``expected_lr`` and ``guard``, for :func:`~hessiankit.optim.check_groups`; ``slices`` for fused parameters; ``use_muon`` for
    Muon; ``name`` for Adam-mini. All are numbers, strings and lists, which ``torch.load(weights_only=True)`` takes.

    Attributes:
        title: Where the ratios are from.
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
        """The groups that it does not, for ``torch.optim.AdamW(groups.adamw)``."""
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
        theirs = [p for g in optimizer.param_groups for p in g["params"]]
        strange = sum(id(p) not in place for p in theirs)
        missing = [names[i] for i in place if i not in {id(p) for p in theirs}]
        if strange or missing:
            seen = f"{strange} parameters that are in no group" if strange else f"no {missing[0]!r}"
            raise InputError(f"apply: the {type(optimizer).__name__} has {seen}; expected the parameters that the groups have.")
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
            for key in _KEYS:
                if key in source:
                    group[key] = [source[key][i] for i in order] if key in _ALIGNED else source[key]
        return optimizer

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows, with one for each type of a fused group under its own."""
        found = []
        for g in self:
            entries = sum(p.numel() for p in g["params"])
            muon = " (Muon)" if g.get("use_muon") else ""
            found.append(_row(g["block_type"] + muon, str(len(g["params"])), entries, g, float(g["lr"])))
            slices = g.get("slices", ())
            for kind in dict.fromkeys(piece["block_type"] for cuts in slices for piece in cuts["pieces"]):
                own = [(cuts, piece) for cuts in slices for piece in cuts["pieces"] if piece["block_type"] == kind]
                shares = [(piece["stop"] - piece["start"]) / cuts["shape"][cuts["axis"]] for cuts, piece in own]
                entries = round(sum(share * math.prod(cuts["shape"]) for share, (cuts, _) in zip(shares, own, strict=True)))
                found.append(_row(f"  {kind}, slices", "", entries, own[0][1], float(g["lr"]) * own[0][1]["factor"]))
        return found

    def _headline(self) -> str:
        return f"{len(self)} groups" + (f"; {self.title}" if self.title else "")

    def _parts(self) -> Iterator[Piece]:
        yield table(HEADERS, self.rows(), title=self.title, drop=("lr x decay", "tensors", "interval", "entries"))
        if self.frozen:
            yield f"frozen, in no group: {', '.join(self.frozen)}"


def _row(kind: str, tensors: str, entries: int, values: dict[str, Any], lr: float) -> tuple[str, ...]:
    low, high, decay = values["ratio_low"], values["ratio_high"], float(values["weight_decay"])
    interval = "" if low is None else f"[{low:.3g}, {high:.3g}]"
    return kind, tensors, f"{entries:,}", f"{values['ratio']:.3g}", interval, f"{lr:.3g}", f"{decay:.3g}", f"{lr * decay:.3g}"
