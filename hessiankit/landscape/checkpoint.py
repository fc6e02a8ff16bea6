"""The state of an iteration in a file, so that an interrupted call goes on where it was."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable, write_bytes

WHO = "spectrum"


class Checkpoint:
    """A file of named states; without a path nothing is kept.

    Args:
        path: The file, or None.
        made_for: What the states depend on.
    """

    def __init__(self, path: Path | None, made_for: dict[str, Any]) -> None:
        self.path, self.made_for = path, made_for
        self.states: dict[str, Any] = {}

    @classmethod
    def of(cls, path: str | os.PathLike[str] | None, made_for: dict[str, Any]) -> Checkpoint:
        """Return a checkpoint with what the file holds.

        Raises:
            InputError: The file cannot be read or written, or was made for something else.
        """
        found = cls(None if path is None else Path(path), made_for)
        check_writable(WHO, found.path)
        if found.path is None or not found.path.exists():
            return found
        try:
            held = torch.load(found.path, weights_only=True)
            seen, states = held["made_for"], held["states"]
        except Exception as error:  # a damaged archive may raise anything
            raise InputError(
                f"{WHO}: cannot read checkpoint={found.path}: {type(error).__name__}; delete it or name another"
            ) from error
        if seen != made_for:
            other = next(name for name in made_for if seen.get(name) != made_for[name])
            raise InputError(
                f"{WHO}: checkpoint={found.path} was made for {other}={seen.get(other)}, this call has {made_for[other]}; "
                "delete it or name another file"
            )
        found.states = states
        return found

    def get(self, *key: str) -> Any:
        """Return a state, or None."""
        return self.states.get("/".join(key))

    def put(self, name: str, part: str, state: Any) -> None:
        """Keep a state, and write the file as a whole."""
        if self.path is None:
            return
        self.states[f"{name}/{part}"] = state
        buffer = io.BytesIO()
        torch.save({"made_for": self.made_for, "states": self.states}, buffer)
        write_bytes(WHO, self.path, buffer.getbuffer())
