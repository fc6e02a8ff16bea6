"""Finished runs as lines of a file, and the processes that do the missing ones."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hessiankit.studies.tuning.experiment import RunResult, RunSpec, Setting, run
from hessiankit.support.jsonl import append_records, read_records, usable
from hessiankit.support.progress import Tell

CODE = ("blocks", "optim", "partition", "studies/text.py", "studies/training.py", "studies/tuning/experiment.py")
"""What the digits of a run depend on, below the package's folder."""


class Runs:
    """Does runs and remembers them; a context, whose end stops the processes.

    Args:
        lines: The file of finished runs, made where it is missing. Lines of other code or another torch do not count.
        jobs: How many processes share the work, each with one thread.
        tell: Called with (what is being done, runs finished, runs expected).
        expected: Runs expected in all.

    Raises:
        InputError: If the file cannot be read or written.
    """

    def __init__(self, lines: Path, *, jobs: int = 1, tell: Tell | None = None, expected: int = 0) -> None:
        self.lines, self.jobs, self.tell, self.expected = lines, jobs, tell, expected
        with usable("tune-lr", lines):
            self._known = {result.spec: result for result in finished_runs(lines)}
            append_records(lines)
        self._used: set[RunSpec] = set()
        self._exit = ExitStack()
        self._map: Callable[[Iterable[RunSpec]], Iterable[RunResult]] | None = None

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._exit.close()

    def __call__(self, specs: list[RunSpec], what: str = "runs") -> dict[RunSpec, RunResult]:
        """Return the results of all of ``specs``, doing those that are not known yet."""
        left = [spec for spec in dict.fromkeys(specs) if spec not in self._known]
        self._used |= set(specs) - set(left)
        self._say(what)
        if left:
            for result in self._runner()(left):
                self._known[result.spec] = result
                self._used.add(result.spec)
                with usable("tune-lr", self.lines):
                    append_records(self.lines, record_of(result))
                self._say(what)
        return {spec: self._known[spec] for spec in specs}

    @property
    def used(self) -> list[RunResult]:
        """The runs that were asked for so far."""
        return [result for spec, result in self._known.items() if spec in self._used]

    def finished(self, setting: Setting) -> list[RunResult]:
        """Return the finished runs of a setting, whoever asked for them."""
        return [result for result in self._known.values() if result.spec.setting == setting]

    def _runner(self) -> Callable[[Iterable[RunSpec]], Iterable[RunResult]]:
        """Return what does runs: in this process, or spread over several, which are started once."""
        if self._map is None:
            if self.jobs == 1:
                self._map = lambda left: map(run, left)
            else:
                pool = multiprocessing.get_context("spawn").Pool(self.jobs, _prepare_worker)
                self._exit.enter_context(pool)  # its exit ends the processes at once
                self._map = lambda left: pool.imap_unordered(run, left)
        return self._map

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what, len(self._used), max(self.expected, len(self._used)))


def record_of(result: RunResult) -> dict[str, Any]:
    """Return a run as a record of the file, losses that are infinite as None."""
    losses = [None if math.isinf(loss) else loss for loss in result.losses]
    return {**asdict(result), "losses": losses, "version": version()}


def finished_runs(path: Path) -> list[RunResult]:
    """Return the finished runs of a file that this code and this torch did."""
    return [result for result in read_records(path, _result) if result is not None]


def _result(record: Any) -> RunResult | None:
    """Return the run of a record, None where other code or another torch did it."""
    if record.pop("version") != version():
        return None
    spec = record["spec"]
    ratios = tuple((kind, factor) for kind, factor in spec["ratios"])
    made = RunSpec(**{**spec, "setting": Setting(**spec["setting"]), "ratios": ratios})
    losses = tuple(math.inf if loss is None else loss for loss in record["losses"])
    return RunResult(**{**record, "spec": made, "steps": tuple(record["steps"]), "losses": losses})


@cache
def version() -> str:
    """Return torch's version and a digest of the code that the digits of a run depend on."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in CODE:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return f"torch {torch.__version__}, code {digest.hexdigest()[:12]}"


def _prepare_worker() -> None:
    """Leave Ctrl-C to the process that shares out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
