"""The file of a monitor: a header and one line of JSON a measurement, append-only; a killed run loses at most one line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path

from hessiankit.support.errors import InputError
from hessiankit.support.files import plain
from hessiankit.support.jsonl import append_lines

FORMAT = 1
KEY = "hessiankit_monitor"
WHO = "monitor"


class Lines:
    """Append lines to a file that may exist already, from an earlier part of the same run.

    The file is opened, written, synchronised and closed for each line: nothing stays open, and nothing is lost when the
    process ends, however it ends. A line that could not be written is written with the next one.

    Attributes:
        path: The file.
        last: Largest step of the run so far, or None.
    """

    def __init__(self, path: Path | str, header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.last: int | None = None
        self._pending = b""
        header_line = to_line({KEY: FORMAT, **header}).encode()
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            if not header_line.startswith(content):
                old_header, records = read_lines(self.path)
                _check(self.path, old_header, json.loads(to_line(header)))
                self.last = max((one["step"] for one in records), default=None)
                os.truncate(self.path, content.rfind(b"\n") + 1)  # without a last line that a kill has torn
            elif content != header_line:  # no file, or the beginning of a header
                if content:
                    os.truncate(self.path, 0)
                append_lines(self.path, header_line)
            self._size = self.path.stat().st_size
        except OSError as error:
            raise InputError(
                f"{WHO}: cannot write {self.path}: {error.strerror}; name a file in a folder that can be written to"
            ) from error

    def append(self, record: dict[str, Any]) -> None:
        """Write one line, after the lines that could not be written before.

        Raises:
            InputError: It could not be written (the file is as before, the line is written with the next one), another process
                wrote to the file, or the record is not JSON.
        """
        try:
            self._pending += to_line(record).encode()
        except TypeError as error:
            raise InputError(
                f"{WHO}: the measurement at step {record['step']} cannot be written: {error}; pass numbers"
            ) from error
        self.last = max(self.last or 0, record["step"])
        retry = "the measurement is kept and written with the next one"
        try:
            if self.path.stat().st_size != self._size:
                raise InputError(
                    f"{WHO}: {self.path} is not as this monitor left it: another process, or another monitor, writes to it. "
                    f"Give each run its own file; {retry}"
                )
            append_lines(self.path, self._pending)
        except OSError as error:
            remedy = "make room" if self.path.exists() else "put the file back"
            raise InputError(
                f"{WHO}: cannot write to {self.path}: {error.strerror}. All earlier measurements are safe; {remedy}: {retry}"
            ) from error
        self._size += len(self._pending)
        self._pending = b""

    def rewind(self, step: int) -> None:
        """Mark, with the next line, that the run resumes at a step: readers drop its measurements at and after that step."""
        if self.last is not None and self.last >= step:
            self._pending += to_line({"rewind": step}).encode()
            self.last = step - 1 if step else None


class Unwritten(Lines):
    """Lines of a process that does not write them: another one does."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, record: dict[str, Any]) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Do nothing."""


def read_lines(path: Path | str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the measurements of a file, of one trajectory by increasing steps.

    What a later line has taken back, and a last line without an end, which a kill leaves, are left out.

    Raises:
        InputError: There is no such file, it is something else, or a line in the middle is damaged.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{WHO}: cannot read {path}: {error.strerror}; name a file that a Monitor wrote") from error
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1]):  # what follows the last line end is torn, or empty
        try:
            lines.append(dict(json.loads(line)))
            if number and not any(isinstance(lines[-1].get(key), int) for key in ("rewind", "step")):
                raise ValueError("no measurement")
        except (ValueError, TypeError) as error:
            fault = "is damaged" if number else "is not the header of a monitor"
            raise InputError(
                f"{WHO}: line {number + 1} of {path} {fault} ({error}); take the line out, or name another file"
            ) from error
    header, *entries = lines or [{}]
    if header.get(KEY) != FORMAT:
        fault = f"has format {header[KEY]}" if KEY in header else "was not written by a Monitor"
        raise InputError(f"{WHO}: {path} {fault}; expected {KEY!r}: {FORMAT} in its first line. Name another file")
    records: list[dict[str, Any]] = []
    for record in entries:
        if "rewind" in record:
            records = [one for one in records if one["step"] < record["rewind"]]
        else:
            records.append(record)
    return header, records


def to_line(record: Mapping[str, Any]) -> str:
    """Return one line of standard JSON: numbers that are not finite become strings, which ``float`` reads.

    >>> to_line({"step": 1, "loss": float("nan"), "gap": [float("inf")], "by": {3: 0.5}})
    '{"step":1,"loss":"nan","gap":["inf"],"by":{"3":0.5}}\\n'
    """
    return json.dumps(plain(record), separators=(",", ":"), allow_nan=False) + "\n"


def _check(path: Path, old_header: Mapping[str, Any], new_header: Mapping[str, Any]) -> None:
    """Compare headers: only the environment may change, when a run is resumed elsewhere."""
    differences = []
    for name in (name for name in new_header if name != "environment"):
        old, new = (dict(tree_flatten_with_path(header.get(name))[0]) for header in (old_header, new_header))
        at = next((key for key in {**new, **old} if old.get(key) != new.get(key)), None)
        if at is not None:
            differences.append(f"{name}{keystr(at)} is {old.get(at)!r} there, {new.get(at)!r} here")
    if differences:
        raise InputError(f"{WHO}: {path} is of another run: {'; '.join(differences)}. Name another file, or measure as there")
