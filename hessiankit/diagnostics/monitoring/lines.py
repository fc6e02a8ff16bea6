"""The file of a monitor: a header and one line of JSON a measurement, append-only; a killed run loses at most one line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.support.files import plain, replace_file
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
        self._waiting = b""
        try:
            if self.path.exists() and self.path.stat().st_size:
                seen, records = read_lines(self.path)
                _check(self.path, seen, header)
                self.last = max((one["step"] for one in records), default=None)
                self._size = self.path.read_bytes().rfind(b"\n") + 1
                os.truncate(self.path, self._size)  # without a last line that a kill has torn
            else:
                content = to_line({KEY: FORMAT, **header}).encode()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, content, durable=True)
                self._size = len(content)
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
            self._waiting += to_line(record).encode()
        except TypeError as error:
            raise InputError(
                f"{WHO}: the measurement at step {record['step']} cannot be written: {error}; pass numbers"
            ) from error
        self.last = max(self.last or 0, record["step"])
        kept = "the measurement is kept and written with the next one"
        try:
            if self.path.stat().st_size != self._size:
                raise InputError(
                    f"{WHO}: {self.path} is not as this monitor left it: another process, or another monitor, writes to it. "
                    f"Give each run its own file; {kept}"
                )
            append_lines(self.path, self._waiting)
        except OSError as error:
            remedy = "make room" if self.path.exists() else "put the file back"
            raise InputError(
                f"{WHO}: cannot write to {self.path}: {error.strerror}. All earlier measurements are safe; {remedy}: {kept}"
            ) from error
        self._size += len(self._waiting)
        self._waiting = b""

    def rewind(self, step: int) -> None:
        """Mark, with the next line, that the run resumes at a step: readers drop its measurements at and after that step."""
        if self.last is not None and self.last >= step:
            self._waiting += to_line({"rewind": step}).encode()
            self.last = step - 1 if step else None


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
    header: dict[str, Any] | None = None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # what follows the last line end is torn, or empty
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no mapping")
            if header is None:
                header = record
            elif isinstance(record.get("rewind"), int):
                records = [one for one in records if one["step"] < record["rewind"]]
            elif isinstance(record.get("step"), int):
                records.append(record)
            else:
                raise ValueError("no measurement")
        except ValueError as error:
            what = "is damaged" if number > 1 else "is not the header of a monitor"
            raise InputError(
                f"{WHO}: line {number} of {path} {what} ({error}); take the line out, or name another file"
            ) from error
    if header is None or header.get(KEY) != FORMAT:
        seen = f"has format {header[KEY]}" if header is not None and KEY in header else "was not written by a Monitor"
        raise InputError(f"{WHO}: {path} {seen}; expected {KEY!r}: {FORMAT} in its first line. Name another file")
    return header, records


def to_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON as every reader takes it: numbers that are not finite become strings, which ``float`` reads.

    >>> to_line({"step": 1, "loss": float("nan"), "gap": [float("inf")], "by": {3: 0.5}})
    '{"step":1,"loss":"nan","gap":["inf"],"by":{"3":0.5}}\\n'
    """
    return json.dumps(plain(record), separators=(",", ":"), allow_nan=False) + "\n"


def _check(path: Path, seen: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Compare headers: the environment may change when a run goes on elsewhere, nothing else may."""
    here = json.loads(to_line(header))
    names = [name for name in here if name != "environment" and here[name] != seen.get(name)]
    if not names:
        return
    different = [_difference(name, seen.get(name), here[name]) for name in names]
    raise InputError(f"{WHO}: {path} is of another run: {'; '.join(different)}. Name another file, or measure as there")


def _difference(name: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(k for k in [*here, *there] if here.get(k) != there.get(k))
        return _difference(f"{name}[{key!r}]", there.get(key), here.get(key))
    if isinstance(there, list) and isinstance(here, list):
        for k, (a, b) in enumerate(zip(there, here, strict=False)):
            if a != b:
                return _difference(f"{name}[{k}]", a, b)
        return f"{name} has {len(there)} entries there, {len(here)} here"
    return f"{name} is {there!r} there, {here!r} here"


def digest(x: Any) -> str:
    """Return a digest of tensors and plain values, nested in any way.

    >>> digest([torch.ones(2), 1]) == digest([torch.ones(2), 1]), digest(torch.ones(2)) == digest(torch.ones(2, 1))
    (True, False)
    """
    total = hashlib.sha256()
    leaves, structure = torch.utils._pytree.tree_flatten(x)
    total.update(str(structure).encode() if len(leaves) != 1 else b"")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            plain = leaf is None or isinstance(leaf, (bool, int, float, str))
            total.update((repr(leaf) if plain else type(leaf).__qualname__).encode())
    return total.hexdigest()
