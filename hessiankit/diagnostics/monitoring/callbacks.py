"""The common part of the trainers' callbacks: a monitor, its numbers for the trainer's log, and a class made on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hessiankit.diagnostics.monitoring.monitor import Monitor
from hessiankit.support.errors import InputError


class MonitorEvents:
    """A ``monitor`` that is made when training begins, in process zero.

    It measures before the first update, by the monitor's schedule, and after the last update, while the other processes wait: a
    measurement has to be quicker than the time-out of the process group. A run that resumes from a checkpoint continues the file.
    """

    def __init__(self, data: Any, path: Path | str, *, log: bool = True, last: bool = True, **options: Any) -> None:
        """Keep the arguments of the monitor.

        Args:
            data: The batches to measure on, e.g. a few that the data collator made of the validation set.
            path: The file.
            log: Whether numbers go to the trainer's log too.
            last: Whether to measure after the last update too.
            **options: Others of :class:`~hessiankit.diagnostics.monitoring.Monitor`;
                ``optimizer="trainer"`` is the trainer's own.
        """
        self.data, self.path, self.options = data, path, options
        self.monitor: Monitor | None = None
        self._log, self._last = log, last

    def _begin(self, model: nn.Module, optimizer: Any) -> None:
        own = {"optimizer": optimizer} if self.options.get("optimizer") == "trainer" else {}
        self.monitor = Monitor(model, self.data, self.path, **{**self.options, **own})

    def _numbers(self, step: int, force: bool, **extra: Any) -> dict[str, float]:
        """Measure if it is time, and return the numbers for the trainer's log; none where nothing is to be logged."""
        record = None if self.monitor is None else self.monitor.step(step, force=force, **extra)
        return {} if record is None or not self._log else scalars(record)


def on_first_use(module: dict[str, Any], events: type, package: str, base: str) -> Callable[[str], type]:
    """Return a module's ``__getattr__`` that derives ``SharpnessCallback`` from ``events`` and the package's class.

    So the module can be imported without the trainer's package, and importing it does not import the package.
    """

    def attribute(name: str) -> type:
        where = module["__name__"]
        if name != "SharpnessCallback":
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        try:
            parent = getattr(importlib.import_module(package), base)
        except (ImportError, RuntimeError) as error:  # RuntimeError: a compiled half that does not fit the installed torch
            raise InputError(
                f"{name}: needs the package {package} ({error}); install it with pip install 'hessiankit[training]'"
            ) from error
        module[name] = type(name, (events, parent), {"__doc__": events.__doc__, "__module__": where})
        return module[name]  # type: ignore[no-any-return]

    return attribute


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a measurement that a trainer's log can hold, by a name with slashes.

    >>> record = {"step": 3, "loss": 2.0, "sharpness": {"types": {"Norm": {"value": 0.5, "low": 0.4}}}}
    >>> scalars(record)
    {'monitor/loss': 2.0, 'sharpness/Norm': 0.5}
    """
    numbers = {"monitor/loss": record["loss"]} if "loss" in record else {}
    numbers |= {f"sharpness/{name}": one["value"] for name, one in record.get("sharpness", {}).get("types", {}).items()}
    numbers |= {f"norm/{name}": value for name, value in record.get("norms", {}).get("types", {}).items()}
    numbers |= {name: record[part][key] for name, (part, key) in SINGLE.items() if key in record.get(part, {})}
    return {name: float(value) for name, value in numbers.items()}


SINGLE = {
    "top_eigenvalue": ("eigenvalue", "value"),
    "preconditioned/eigenvalue": ("preconditioned", "value"),
    "preconditioned/over_threshold": ("preconditioned", "ratio"),
    "critical/sharpness": ("critical", "sharpness"),
    "critical/multiple": ("critical", "multiple"),
}
"""Name in a trainer's log, section of a measurement, and number of it; one that waits for the optimizer has none."""
