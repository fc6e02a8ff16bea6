"""Block types by part name, as a dict that prints as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hessiankit.parts.part import TYPES, Part
from hessiankit.tables import Piece, Printed, table

_HEADERS = ("part", "type", "role", "found by", "layer", "entries")


class BlockTypes(Printed, dict[str, str]):
    """The block type of every part of a model, by ``Part.name``, in the order of ``named_parameters()``.

    A plain dict for everything that reads one (``json.dumps``, ``==``), with the parts beside it.

    Attributes:
        parts: What :func:`hessiankit.parts.model_parts` returns.

    >>> types = BlockTypes([Part("w", "FFN", "up", 0, "Linear of a block", 6), Part("g", "Norm", "gain", 0, "LayerNorm", 3)])
    >>> types, types.entries
    ({'w': 'FFN', 'g': 'Norm'}, {'FFN': 6, 'Norm': 3})
    """

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = tuple(parts)
        super().__init__({part.name: part.type for part in self.parts})

    @property
    def entries(self) -> dict[str, int]:
        """Number of entries by type, for the types that occur."""
        sizes = {kind: sum(part.size for part in self.parts if part.type == kind) for kind in TYPES}
        return {kind: size for kind, size in sizes.items() if size}

    def of_type(self, block_type: str) -> tuple[Part, ...]:
        """Return the parts of one type."""
        return tuple(part for part in self.parts if part.type == block_type)

    def _rows(self) -> list[tuple[str, ...]]:
        return [(p.name, p.type, p.role, p.reason, "" if p.layer is None else str(p.layer), f"{p.size:,}") for p in self.parts]

    def _totals(self) -> list[tuple[str, ...]]:
        total = sum(self.entries.values())
        return [
            (kind, str(len(self.of_type(kind))), f"{size:,}", f"{100 * size / total:.1f} %")
            for kind, size in self.entries.items()
        ]

    __repr__ = dict.__repr__  # it is a dict of strings to all who read one

    def _headline(self) -> str:
        return f"{len(self)} parts of {len(self.entries)} block types"

    def _parts(self) -> Iterator[Piece]:
        names = [part.name for part in self.parts]
        yield table(_HEADERS, self._rows(), left=4, names=names, prose=("found by",), drop=("found by", "role"))
        yield table(("type", "parts", "entries", "share"), self._totals())
