"""The training runs of a comparison, kept in a file as they finish."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from hessiankit.support.environment import code_version
from hessiankit.support.progress import Tell
from papers.experiments.resumable import Resumable
from papers.experiments.tuning.experiment import RunResult, RunSpec, Setting, run

CODE = (
    "hessiankit/blocks", "hessiankit/training/optim", "hessiankit/training/partition", "hessiankit/cli/text.py",
    "papers/experiments/training.py", "papers/experiments/tuning/experiment.py",
)  # fmt: skip
"""What the digits of a run depend on."""


class Runs(Resumable[RunSpec, RunResult]):
    """Does runs and remembers them; lines of other code or another torch do not count."""

    def __init__(self, lines: Path, *, jobs: int = 1, tell: Tell | None = None, expected: int = 0) -> None:
        super().__init__("tune-lr", lines, run, attrgetter("spec"), record_of, _result, jobs=jobs)
        self.tell, self.expected = tell, expected
        self._used: set[RunSpec] = set()

    def __call__(self, specs: Sequence[RunSpec], what: str = "runs") -> dict[RunSpec, RunResult]:
        """Return the results of all of ``specs``, doing those that are not known yet."""
        self._used |= set(specs) & self.known.keys()
        self._say(what)
        for result in self.finish(specs):
            self._used.add(result.spec)
            self._say(what)
        return {spec: self.known[spec] for spec in specs}

    @property
    def used(self) -> list[RunResult]:
        """The runs that were asked for so far."""
        return [result for spec, result in self.known.items() if spec in self._used]

    def finished(self, setting: Setting) -> list[RunResult]:
        """Return the finished runs of a setting, those that were not asked for too."""
        return [result for result in self.known.values() if result.spec.setting == setting]

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what, len(self._used), max(self.expected, len(self._used)))


def record_of(result: RunResult) -> dict[str, Any]:
    """Return a run as a record of the file, losses that are infinite as None."""
    losses = [None if math.isinf(loss) else loss for loss in result.losses]
    return {**asdict(result), "losses": losses, "version": code_version(*CODE)}


def _result(record: Any) -> RunResult | None:
    """Return the run of a record, None where other code or another torch did it."""
    if record.pop("version") != code_version(*CODE):
        return None
    spec = record["spec"]
    ratios = tuple((kind, factor) for kind, factor in spec["ratios"])
    made = RunSpec(**{**spec, "setting": Setting(**spec["setting"]), "ratios": ratios})
    losses = tuple(math.inf if loss is None else loss for loss in record["losses"])
    return RunResult(**{**record, "spec": made, "steps": tuple(record["steps"]), "losses": losses})
