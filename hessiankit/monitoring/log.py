"""What a monitor wrote, read back: numbers by step, and a table that says in which order the blocks stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hessiankit.arguments import checked
from hessiankit.errors import InputError
from hessiankit.monitoring.lines import read_lines
from hessiankit.tables import Piece, Printed, table


class Series(NamedTuple):
    """An estimate by step: three arrays (steps,), NaN where a step has none."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, repr=False)
class MonitorLog(Printed):
    """The measurements of one run; made by :func:`read_monitor`.

    Attributes:
        path: The file.
        header: What was measured, of what, and where: parts, options, environment.
        records: One mapping a measurement, in the order of the steps.
    """

    path: Path
    header: dict[str, Any]
    records: tuple[dict[str, Any], ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def steps(self) -> np.ndarray:
        """Steps of training, (steps,)."""
        return np.array([record["step"] for record in self.records], dtype=int)

    @property
    def types(self) -> tuple[str, ...]:
        """Block types of the model, in the order of its parameters."""
        return tuple(dict.fromkeys(part["type"] for part in self.header["parts"]))

    @property
    def errors(self) -> dict[int, dict[str, str]]:
        """Step -> what failed there -> its error; steps where nothing failed are left out."""
        return {record["step"]: record["errors"] for record in self.records if record.get("errors")}

    def series(self, *keys: str | int) -> np.ndarray:
        """Return one number, or one array, of every measurement, NaN where it has none.

        Args:
            *keys: The way to it, e.g. ``"sharpness", "types", "Norm", "value"`` or ``"norms", "types", "Emb"``.

        Raises:
            InputError: No measurement has it, or its shape changes from one to the next.

        Returns:
            (steps,), or (steps, ...) for an array.
        """
        found = self.entries(*keys)
        inside = next((x for x in found if isinstance(x, dict)), None)
        if inside is not None:
            raise InputError(
                f"MonitorLog: {' / '.join(map(str, keys)) or 'a measurement'} holds {', '.join(inside)}; name one of them"
            )
        arrays = [None if x is None else np.asarray(x, dtype=float) for x in found]
        shapes = {a.shape for a in arrays if a is not None}
        if len(shapes) != 1:
            seen = "no measurement has it" if not shapes else f"its shape changes: {sorted(shapes)}"
            raise InputError(f"MonitorLog: {' / '.join(map(str, keys))} of {self.path}: {seen}; see .records for what there is")
        nothing = np.full(next(iter(shapes)), np.nan)
        return np.stack([nothing if a is None else a for a in arrays])

    def entries(self, *keys: str | int) -> list[Any]:
        """Return what stands at ``keys`` in every measurement, None where nothing does."""
        return [_at(record, keys) for record in self.records]

    def has(self, *keys: str | int) -> bool:
        """Return whether some measurement has such an entry."""
        return any(found is not None for found in self.entries(*keys))

    @property
    def sharpness(self) -> dict[str, Series]:
        """Type -> average sharpness by step, with its interval."""
        names = [name for name in self.types if self.has("sharpness", "types", name)]
        return {name: Series(*(self.series("sharpness", "types", name, key) for key in Series._fields)) for name in names}

    @property
    def norms(self) -> dict[str, np.ndarray]:
        """Type -> Euclidean norm of its parameters by step, (steps,)."""
        return {name: self.series("norms", "types", name) for name in self.types if self.has("norms", "types", name)}

    @property
    def orders(self) -> dict[int, tuple[str, ...]]:
        """Step -> types from flat to sharp."""
        found = {}
        for record in self.records:
            values = {name: float(one["value"]) for name, one in (_at(record, ("sharpness", "types")) or {}).items()}
            if values:
                found[record["step"]] = tuple(sorted(values, key=values.__getitem__))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"path": str(self.path), "header": self.header, "records": list(self.records), "orders": self.orders}

    def _headline(self) -> str:
        header = self.header
        head = f"{header['model']}, {header['entries']:,} parameters; measurements: {len(self)}"
        return head + (f", steps {self.steps.min()} to {self.steps.max()}" if len(self) else "") + f"; {self.path.name}"

    def _parts(self) -> Iterator[Piece]:
        headers, rows = self._table()
        order = headers[1:2] if self.orders else []
        drop = [header for header in reversed(headers[1:]) if header not in (*order, "loss")]
        yield self._headline()
        yield table(headers, rows, left=2 if self.orders else 1, prose=order, drop=drop, spread=True)
        yield from (f"step {step}: {what} failed: {text}" for step, found in self.errors.items() for what, text in found.items())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: the types from flat to sharp, the loss, the norm of all parameters, the top eigenvalue."""
        columns = {"loss": ("loss",), "parameter norm": ("norms", "total"), "top eigenvalue": ("eigenvalue", "value")}
        columns |= {"variance by layer": ("depth", "laws", "best")}
        columns = {title: keys for title, keys in columns.items() if self.has(*keys)}
        rows = []
        for record in self.records:
            found = [_at(record, keys) for keys in columns.values()]
            order = [_at(record, ("sharpness", "ordering")) or ""] if self.orders else []
            numbers = [_shown(x) for x in found]
            rows.append([str(record["step"]), *order, *numbers])
        return ["step", *(["sharpness, flat to sharp (~: not told apart)"] if self.orders else []), *columns], rows


@checked("read_monitor")
def read_monitor(path: Path | str) -> MonitorLog:
    """Read the file that a :class:`~hessiankit.monitoring.Monitor` writes, also while it is being written.

    Args:
        path: The file.

    Raises:
        InputError: There is no such file, or it is something else.
    """
    header, records = read_lines(path)
    return MonitorLog(Path(path), header, tuple(sorted(records, key=lambda record: record["step"])))


def _at(record: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        if not isinstance(record, Mapping) or str(key) not in record:
            return None
        record = record[str(key)]
    return record


def _shown(x: Any) -> str:
    """Return a table's cell: a number with four digits, a word as it is.

    >>> [_shown(x) for x in (None, 2.34567, "inf", "linear")]
    ['', '2.346', 'inf', 'linear']
    """
    try:
        return "" if x is None else f"{float(x):.4g}"
    except ValueError:
        return str(x)
