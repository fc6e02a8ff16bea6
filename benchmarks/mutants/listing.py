"""The lists of mutants: one text file a room.

    @ derivations/softmax.py | tests/derivations/test_operations.py tests/request/test_batches.py
    - out = adjoint - a * total
    + out = adjoint + a * total

A head names the file and the tests that are meant to see its mutants, with environment variables among them if they need any
(``HESSIANKIT_COMPILED=1``). It holds until the next head. Lines with ``-`` are the old text, which must occur once in the file,
those with ``+`` the new text, ``#`` a remark; an empty line ends a mutant. ``# check: ...`` gives the reason why
``hessiankit.check`` cannot see it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hessiankit.support.errors import InputError

LISTS = Path(__file__).parent / "lists"
CHECK = "check: "
_SETTING = re.compile(r"[A-Z_]+=")


class Stale(Exception):
    """A mutant whose old text is not in its file, or is there more than once, or one of whose tests is gone."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests meant to see it.

    Attributes:
        file: Path in the tree.
        old: Text to replace; it occurs once.
        new: Text in its place.
        tests: Files or node ids for pytest.
        environment: Variables to set, as NAME=VALUE.
        remark: Why it is hard to see, or equivalent, if the list says so.
        beyond_check: Why it bears on nothing that ``check`` compares, if the list says so.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    environment: tuple[str, ...] = ()
    remark: str = ""
    beyond_check: str = ""

    @property
    def room(self) -> str:
        """The package that the file lies in."""
        return room_of(self.file)

    @property
    def key(self) -> str:
        """What tells this change from others."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def applied(self, root: Path) -> str:
        """Return the text of its file in a tree with the change.

        Raises:
            Stale: The old text does not occur once, or a file or a test is gone.
        """
        for test in self.tests:
            path, _, name = test.partition("::")
            function = f"def {name.partition('[')[0]}(" if name else ""
            if not (root / path).is_file() or function not in (root / path).read_text(encoding="utf-8"):
                raise Stale(f"no test {test}")
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(self.old)
        if count != 1:
            raise Stale(f"the old text occurs {count} times")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {' / '.join(self.old.split())} -> {' / '.join(self.new.split())}".replace(" / ", " ")


def room_of(file: str) -> str:
    """Return the package that a file lies in.

    >>> room_of("hessiankit/engine/storage.py"), room_of("derivations/softmax.py")
    ('engine', 'derivations')
    """
    parts = Path(file).parts
    return parts[0] if parts[0] != "hessiankit" else parts[1] if len(parts) > 2 else "top level"


def read(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a list.

    Raises:
        InputError: A line, or a mutant, cannot be read.
    """
    file, tests, settings = "", (), ()  # type: tuple[str, tuple[str, ...], tuple[str, ...]]
    parts: dict[str, list[str]] = {"-": [], "+": [], "#": []}
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        sign, text = line[:1], line[2:]
        if sign in parts:
            parts[sign].append(text)
        elif sign in ("@", ""):
            old, new = "\n".join(parts["-"]), "\n".join(parts["+"])
            if bool(parts["-"]) != bool(parts["+"]) or (old and (old == new or not tests)):
                raise InputError(f"{path.name}, line {number}: a mutant needs a head with tests, '-' lines and other '+' lines")
            if old:
                remarks = [[line for line in parts["#"] if line.startswith(CHECK) is beyond] for beyond in (False, True)]
                yield Mutant(file, old, new, tests, settings, " ".join(remarks[0]), " ".join(remarks[1]).removeprefix(CHECK))
            parts = {"-": [], "+": [], "#": []}
            if sign:
                file, _, words = (part.strip() for part in text.partition("|"))
                tests = tuple(word for word in words.split() if not _SETTING.match(word))
                settings = tuple(word for word in words.split() if _SETTING.match(word))
        else:
            raise InputError(f"{path.name}, line {number}: {line!r} begins with none of '@ ', '- ', '+ ', '# '")


def every(folder: Path = LISTS) -> list[Mutant]:
    """Return the mutants of all lists, list by list.

    Raises:
        InputError: A list cannot be read, or two mutants are the same.
    """
    mutants = [mutant for path in sorted(folder.glob("*.txt")) for mutant in read(path)]
    seen: dict[str, Mutant] = {}
    for mutant in mutants:
        if seen.setdefault(mutant.key, mutant) is not mutant:
            raise InputError(f"mutants: listed twice: {mutant}")
    return mutants
