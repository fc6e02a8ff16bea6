"""The state from which an interrupted training run resumes, with checksums of the files already written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from figures._store import checksum, put, read, set_aside
from hessiankit.diagnostics.monitoring.lines import read_lines
from hessiankit.studies.training import torch_bytes
from hessiankit.support.errors import InputError

MONITORED = "monitor.jsonl"


class State:
    """The unfinished run in a folder, in a file that is replaced as a whole.

    Args:
        folder: Of the run.
        identity: What tells it from others, as JSON holds it.
        **parts: What has a ``state_dict``.

    Attributes:
        files: Checksums by name, of models that are written once.
    """

    def __init__(self, folder: Path, identity: Any, drawn: torch.Generator, **parts: Any) -> None:
        self.folder, self.identity, self.drawn, self.parts = folder, identity, drawn, parts
        self.path = folder / "unfinished.pt"
        self.files: dict[str, str] = {}

    def load(self) -> Any:
        """Put the parts back to where the file left them and return what was saved with them; None where a run begins.

        What is damaged is set aside: the state, or the whole folder where files do not fit it.

        Raises:
            InputError: A file cannot be read, or not be set aside.
        """
        found = self._found()
        if found is None:
            self._clear_monitor()
            return None
        for name, part in self.parts.items():
            part.load_state_dict(found["parts"][name])
        self.drawn.set_state(found["drawn"])
        self.files = found["files"]
        return found["so far"]

    def save(self, so_far: Any) -> None:
        """Write the parts as they are, with numbers that the run goes on with.

        Raises:
            InputError: The file cannot be written.
        """
        monitored = read(self.folder / MONITORED) or b""
        content = {
            "identity": self.identity, "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "drawn": self.drawn.get_state(), "files": self.files, "monitored": [len(monitored), checksum(monitored)],
            "so far": so_far,
        }  # fmt: skip
        put(self.path, torch_bytes(content))

    def keep(self, name: str, content: Any) -> None:
        """Write what torch can, beside the state, and remember its checksum.

        Raises:
            InputError: The file cannot be written.
        """
        data = torch_bytes(content)
        put(self.folder / name, data)
        self.files[name] = checksum(data)

    def _found(self) -> Any:
        content = read(self.path)
        if content is None:
            return None
        try:
            found = torch.load(io.BytesIO(content), weights_only=True)
            other = found["identity"] != self.identity
            size, expected = found["monitored"]
        except Exception as error:  # a damaged archive may raise anything
            set_aside(self.path, f"it cannot be read ({type(error).__name__})")
            return None
        if other:
            set_aside(self.path, "it is of something else")
            return None
        changed = [name for name, known in found["files"].items() if checksum(read(self.folder / name) or b"") != known]
        if checksum((read(self.folder / MONITORED) or b"")[:size]) != expected:
            changed.append(MONITORED)
        if changed:
            set_aside(self.folder, f"{', '.join(changed)} changed after the interruption")
            return None
        return found

    def _clear_monitor(self) -> None:
        """Set a file of measurements aside that the monitor of a run that begins would refuse."""
        path = self.folder / MONITORED
        try:
            if read(path):
                read_lines(path)
        except InputError as error:
            set_aside(path, str(error).partition("; ")[0])
