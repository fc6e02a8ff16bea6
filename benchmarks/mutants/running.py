"""Running mutants in a copy of the tree: the working tree is never edited."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.mutants.listing import Mutant, Stale
from hessiankit.support.errors import InputError

KILLED, SURVIVED, UNDECIDED = "killed", "survived", "undecided"
STALE, UNTESTED = "no longer applies", "tests fail without it"
COPIED = ("derivations", "hessiankit", "papers", "tests", "benchmarks", "figures", "docs", "notebooks", ".ci")
_FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """Result of one mutant.

    Attributes:
        state: "killed", "survived", "undecided" (out of time, as the tests nearly are without the mutant), "no longer applies",
            or "tests fail without it", which could tell nothing.
        by: The first test that failed, or a reason.
        seconds: Time of the run.
    """

    state: str
    by: str = ""
    seconds: float = 0.0


class Workshop:
    """A copy of the tree and a process that runs tests in it.

    Args:
        root: The tree.
        limit: Seconds that a run may take.
        check: Run ``check`` on a fixed set of modules rather than the tests.
    """

    def __init__(self, root: Path, limit: float, *, check: bool = False) -> None:
        self.limit, self.check = limit, check
        self._folder = TemporaryDirectory(prefix="mutants-")
        self.tree = Path(self._folder.name) / "tree"
        self.tree.mkdir()
        for path in root.iterdir():
            if path.is_file():
                shutil.copy2(path, self.tree)
            elif path.name in COPIED:
                shutil.copytree(path, self.tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)  # nothing of the working tree is to be found
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder.name,
            env=environment,
        )
        self._stamp = 0
        self._healthy: dict[tuple[Any, ...], float | None] = {}

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # which ends the run that it has under way
        self._process.communicate()
        self._folder.cleanup()

    def run(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, run its tests, and undo it."""
        mutant = replace(mutant, tests=()) if self.check else mutant
        path = self.tree / mutant.file
        try:
            changed = mutant.applied(self.tree)
        except Stale as stale:
            return Verdict(STALE, str(stale))
        before = path.read_text(encoding="utf-8")
        try:
            self._write(path, changed)
            code, seconds, by = self._ask(mutant)
        finally:
            self._write(path, before)
        if code == 0:
            return Verdict(SURVIVED, by, seconds)
        if code is None:  # an endless loop, where the same tests are quick without it
            alone = self._without(mutant, mutant.tests)
            quick = alone is not None and alone < self.limit / 10
            return (
                Verdict(KILLED, f"out of time, {alone:.1f} s without it", seconds) if quick else Verdict(UNDECIDED, "", seconds)
            )
        # the test that failed, or where it is not known by name, all of them
        failed = (by,) if by and (self.check or "::" in by) else mutant.tests
        return Verdict(UNTESTED if self._without(mutant, failed) is None else KILLED, by, seconds)

    def _without(self, mutant: Mutant, tests: tuple[str, ...]) -> float | None:
        """Return the seconds that tests take in the tree as it is, or None where they do not pass there."""
        if (tests, mutant.environment) not in self._healthy:
            code, seconds, _ = self._ask(replace(mutant, tests=tests))
            self._healthy[tests, mutant.environment] = seconds if code == 0 else None
        return self._healthy[tests, mutant.environment]

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: Python recognises what it compiled before by time and size."""
        path.write_text(text, encoding="utf-8")
        self._stamp += 1
        os.utime(path, (1_000_000_000 + self._stamp,) * 2)

    def _ask(self, mutant: Mutant) -> tuple[int | None, float, str]:
        log = Path(self._folder.name) / "log"
        # plain torch unless the mutant says otherwise: a verdict must not hang on what was compiled on this machine
        environment: Mapping[str, str] = {
            "HESSIANKIT_COMPILED": "0",
            **dict(setting.split("=", 1) for setting in mutant.environment),
        }
        tests: Sequence[str] = mutant.tests
        request = {"tree": str(self.tree), "log": str(log), "environment": environment, "tests": tests}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**request, "check": self.check, "limit": self.limit}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise InputError("mutants: the process that runs the tests has ended; is pytest installed?")
        answer = json.loads(line)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        first = _FIRST.search(text)
        lines = [line for line in text.splitlines() if line.strip()]
        return answer["code"], answer["seconds"], first[1] if first else lines[-1][:120] if lines and answer["code"] else ""
