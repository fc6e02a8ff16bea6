"""What one command has drawn so far, so that the same command goes on where an interrupt or a failure left it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from figures._kit import version, write_json

CODE = ("figures", "hessiankit", "derivations")


@dataclass
class Sitting:
    """The figures that one command asks for, and the files of those that are drawn.

    Attributes:
        path: The file that remembers them; gone as soon as all of them are drawn.
        command: What was asked for, and with what code.
        drawn: Files by figure.
    """

    path: Path
    command: dict[str, object]
    drawn: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Path, names: Sequence[str], quick: bool, suffix: str) -> Sitting:
        """Return the sitting of a command: the unfinished one, if the last command in this folder was the same."""
        command: dict[str, object] = {"names": list(names), "quick": quick, "suffix": suffix, "made by": version(*CODE)}
        path = out / "cache" / "unfinished.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            drawn = before["drawn"] if before["command"] == command else {}
            return cls(path, command, {name: files for name, files in drawn.items() if all(Path(f).exists() for f in files)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(path, command)

    def add(self, name: str, files: Sequence[Path]) -> None:
        """Remember a figure that is drawn.

        Raises:
            InputError: The file cannot be written.
        """
        self.drawn[name] = [str(file) for file in files]
        write_json(self.path, {"command": self.command, "drawn": self.drawn})

    def close(self) -> None:
        """Forget it: the next command draws all figures anew."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # other things are kept there
            self.path.parent.rmdir()
