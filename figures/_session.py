"""A drawing command that can be resumed: figures and answers already made are read back after an interrupt or a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hessiankit.support.environment import code_version
from papers.experiments.store import NOTHING, keep, recall

CODE = ("figures", "papers/experiments", "hessiankit", "derivations")


@dataclass
class DrawingSession:
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
    def of(cls, out: Path, names: Sequence[str], quick: bool, suffix: str, sources: Mapping[str, str]) -> DrawingSession:
        """Return the session of a command: the unfinished one, if the last command in this folder was the same.

        Raises:
            InputError: What is kept of the last command cannot be read.
        """
        command: dict[str, object] = {"names": list(names), "quick": quick, "suffix": suffix, "sources": dict(sources)}
        command["made by"] = code_version(*CODE)
        path = out / "cache" / "unfinished.pt"
        before = recall(path, command, exclusive=False)
        drawn = {} if before is NOTHING else before
        return cls(path, command, {name: files for name, files in drawn.items() if all(Path(f).exists() for f in files)})

    def add(self, name: str, files: Sequence[Path]) -> None:
        """Remember a figure that is drawn.

        Raises:
            InputError: The file cannot be written.
        """
        self.drawn[name] = [str(file) for file in files]
        keep(self.path, self.command, self.drawn)

    def close(self) -> None:
        """Forget it: the next command draws all figures anew."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # other things are kept there
            self.path.parent.rmdir()
