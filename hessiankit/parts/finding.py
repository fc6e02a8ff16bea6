"""What one route says about one parameter, or a slice of it; and where a parameter lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TYPE_OF_ROLE = {
    "query": "QK",
    "key": "QK",
    "shared key": "QK",
    "value": "VO",
    "output": "VO",
    "latent": "Other",
    "router": "Other",
    "attention sink": "Other",
}
"""What attention's roles count as. A latent that feeds keys and values alike, and a router, are none of the paper's types."""


@dataclass(frozen=True)
class Finding:
    """What one route says about a parameter, or a slice of it.

    Attributes:
        type: One of :data:`hessiankit.parts.part.TYPES`.
        role: What it does there.
        reason: How this was found, as a reader is told.
        axis: Axis that ``segments`` cut; None for the whole parameter.
        segments: (first, after last) along that axis.
        firm: Whether module types or the flow of data say so, so that a contradiction is an error; not where only the place
            in the model, or a name, does.
    """

    type: str
    role: str
    reason: str
    axis: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    firm: bool = True


@dataclass(frozen=True)
class Owner:
    """One place of a parameter: the path of the module that holds it, that module, and the parameter's name in it.

    A tied parameter has several.
    """

    path: str
    module: nn.Module
    leaf: str

    @property
    def name(self) -> str:
        """The parameter's name by this place."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """Return every place of every parameter, by its name in ``named_parameters()``, in that order.

    >>> first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> second.weight = first.weight
    >>> {name: [o.name for o in places] for name, places in owners(nn.Sequential(first, second)).items()}
    {'0.weight': ['0.weight', '1.weight']}
    """
    listed = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[Owner]] = {name: [] for name in listed.values()}
    for path, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False, remove_duplicate=False):
            found[listed[id(p)]].append(Owner(path, module, leaf))
    return found


def within(path: str, root: str) -> bool:
    """Tell whether a module's path is that of ``root`` or below it.

    >>> within("h.1.mlp", "h.1"), within("h.11", "h.1"), within("h", "")
    (True, False, True)
    """
    return not root or path == root or path.startswith(f"{root}.")


def below(path: str, leaf: str) -> str:
    """Return the path of a child.

    >>> below("", "h"), below("h", "0")
    ('h', 'h.0')
    """
    return f"{path}.{leaf}" if path else leaf


def segments_of(line: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first, after last) of the runs of True.

    >>> list(segments_of(torch.tensor([True, True, False, True])))
    [(0, 2), (3, 4)]
    """
    edges = torch.diff(torch.nn.functional.pad(line.int(), (1, 1)))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    yield from zip(starts, ends, strict=True)


def segments_left(found: list[Finding], p: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the segments that findings leave of a parameter, along their axis; one of anything if there are no findings.

    >>> segments_left([Finding("QK", "query", "", 0, ((1, 3),))], torch.ones(5, 2))
    ((0, 1), (3, 5))
    """
    if not found:
        return ((0, 1),)
    if found[0].axis is None:
        return ()
    free = torch.ones(p.shape[found[0].axis], dtype=torch.bool)
    for first, after in (segment for f in found for segment in f.segments):
        free[first:after] = False
    return tuple(segments_of(free))
