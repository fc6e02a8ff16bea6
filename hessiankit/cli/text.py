"""Bytes of text as the tokens of a small language model: Python's own standard library, or files of your own.

Nothing is downloaded. Every byte is a token (vocabulary 256), and what is held out are whole files, so that a held-out line was
never read in training.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from hessiankit.support.errors import InputError, check_name

SPLITS = ("train", "validation")
VOCAB_SIZE = 256
HELD_OUT = 0.1  # probability that a file is held out
STDLIB_EXCLUDED = (
    "site-packages", "dist-packages", "config-*",  # installed by somebody, or written by the installer
    "test", "tests", "idlelib", "turtledemo",  # not part of the library, and missing in some installations
    "encodings", "pydoc_data", "lib2to3",  # tables of characters, topics and grammar rather than code
)  # fmt: skip
"""Folders of the standard library that are left out, at any depth; so are the installer's files ``_sysconfigdata*.py``."""


@dataclass(frozen=True, eq=False, repr=False)
class TextDataset:
    """The bytes of files, one after the other: ``tokens``, ``(N,)`` of torch.uint8, and the files' names in that order."""

    tokens: Tensor
    files: tuple[str, ...]
    name: str

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __repr__(self) -> str:
        return f"TextDataset({self.name}: {len(self.files)} files, {len(self)} bytes)"

    @property
    def digest(self) -> str:
        """The first 16 digits of the bytes' SHA-256: another version of Python has another standard library."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]

    def batch(self, batch_size: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return random windows as inputs and next tokens, both ``(batch_size, length)`` of torch.int64.

        The generator, by default torch's global one, draws where the windows begin.

        Raises:
            InputError: A size is not positive, or the text is shorter than a window.
        """
        self._check("batch", batch_size, length)
        return self._at(torch.randint(len(self) - length, (batch_size,), generator=generator, device="cpu"), length)

    def windows(self, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` fixed windows, spread evenly from the first byte to the last, as :meth:`batch` does.

        Raises:
            InputError: A size is not positive, or the text is shorter than a window.

        >>> text = TextDataset(torch.arange(10, dtype=torch.uint8), ("a.py",), "ten")
        >>> inputs, targets = text.windows(3, 3)
        >>> inputs.tolist(), targets[-1].tolist()
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [7, 8, 9])
        """
        self._check("windows", count, length)
        last = len(self) - length - 1
        return self._at(torch.tensor([k * last // max(count - 1, 1) for k in range(count)], device="cpu"), length)

    def _at(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        rows = self.tokens[starts[:, None] + torch.arange(length + 1, device="cpu")].long()  # (B, L + 1)
        return rows[:, :-1], rows[:, 1:]

    def _check(self, method: str, count: int, length: int) -> None:
        if count < 1 or length < 1:
            raise InputError(f"TextDataset.{method}: asked for {count} windows of {length} tokens; expected 1 or more of each")
        if length >= len(self):
            why = f"needs {length + 1} bytes, and {self.name} has {len(self)}; ask for shorter windows or give more text"
            raise InputError(f"TextDataset.{method}: a window of {length} tokens and the next one {why}")


def load_text(source: str | Path = "stdlib", *, split: str = "train", seed: int = 0) -> TextDataset:
    """Return one split of a text, as bytes.

    A file is held out with probability 1/10 by a hash of its name and the seed, whatever other files there are. The files follow
    each other in the order of their names. A single file is cut instead: its last tenth is held out.

    Args:
        source: ``"stdlib"``, the ``.py`` files of the running Python's standard library without the folders
            :data:`STDLIB_EXCLUDED`; or a path: a text file, or a folder, of which every file counts at any depth but hidden
            ones and those with a zero byte, which are no text.
        split: ``"train"`` or ``"validation"``.
        seed: Seed that decides which files are held out.

    Raises:
        InputError: The source or the split is unknown, a file cannot be read, or nothing is left for the split.

    >>> train, held_out = load_text(), load_text(split="validation")
    >>> train.tokens.dtype, train.name, set(train.files) & set(held_out.files)
    (torch.uint8, 'stdlib train', set())
    """
    check_name("load_text", "split", split, SPLITS)
    path = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source).expanduser()
    if not path.exists():
        why = "is neither 'stdlib' nor an existing path; nothing is downloaded, so give a text file or a folder of them"
        raise InputError(f"load_text: {str(source)!r} {why}")
    if path.is_dir():
        names = _files(path, ".py", STDLIB_EXCLUDED, "_sysconfigdata") if source == "stdlib" else _files(path, "", (), ".")
        texts = {name: _read(path / name) for name in names if held_out(name, seed) == (split == "validation")}
        texts = {name: text for name, text in texts.items() if b"\0" not in text}
        why = f"has {len(names)} files, and none with text falls to {split!r} with seed={seed}; give more files, another seed, "
        why += "or one file, which is cut"
    else:
        text = _read(path)
        at = len(text) - int(len(text) * HELD_OUT)
        texts = {path.name: text[:at] if split == "train" else text[at:]}
        why = f"has {len(text)} bytes, which leaves none for {split!r}; give a longer text"
    content = b"".join(texts.values())
    if not content:
        raise InputError(f"load_text: {path} {why}")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return TextDataset(tokens, tuple(texts), f"{source if source == 'stdlib' else path.name} {split}")


def held_out(name: str, seed: int = 0) -> bool:
    """Return whether the file of this name (with ``/`` between folders) is held out.

    >>> [name for name in ("abc.py", "json/decoder.py", "this.py", "typing.py", "zipfile.py") if held_out(name)]
    ['abc.py', 'typing.py', 'zipfile.py']
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64


def _files(folder: Path, suffix: str, excluded: tuple[str, ...], skipped: str) -> list[str]:
    """Return the names of the files below a folder, without folders of some names and files of some beginning, sorted."""
    paths: list[Path] = []
    for root, folders, names in os.walk(folder):  # os.walk enters the folders that are left in its list
        folders[:] = [f for f in folders if not any(fnmatch(f, pattern) for pattern in (*excluded, ".*"))]
        paths += [Path(root, name) for name in names if name.endswith(suffix) and not name.startswith(skipped)]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"load_text: cannot read {path}: {error.strerror}; give files that can be read") from error
