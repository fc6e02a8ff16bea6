"""A monitor of one training run: it measures the model at some steps and writes a line of JSON each time."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from hessiankit.landscape.optimizer_states import listed, name_of
from hessiankit.request.data import on_device_of
from hessiankit.support.arguments import check_whole, checked, is_sharded
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.torch_state import ordinary_path, preserved_random_states, preserved_state
from hessiankit.training.digest import digest
from hessiankit.training.monitoring.lines import Lines, Unwritten
from hessiankit.training.monitoring.log import MonitorLog
from hessiankit.training.monitoring.measurements import (
    MEASUREMENTS,
    OF_OPTIMIZERS,
    OVER_RANKS,
    MonitoredRun,
    Section,
    batches_of,
    scalars,
)
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.sharpness.options import parts_by_flow

if TYPE_CHECKING:
    from hessiankit.training.monitoring.over_ranks import MonitorRanks


def due(step: int, every: int, *, log_spaced: bool = False) -> bool:
    """Return whether a step is measured: multiples of ``every``, and with ``log_spaced`` also 1, 2, 5, 10, 20, 50, ... below it.

    >>> [step for step in range(101) if due(step, 50, log_spaced=True)]
    [0, 1, 2, 5, 10, 20, 50, 100]
    """
    if every < 1:
        raise InputError(f"monitor: every={every} measures at no step; pass 1 or more")
    if step < 0:
        raise InputError(f"monitor: step={step}; expected the number of updates done, 0 or more")
    is_early = log_spaced and step < every and str(step).rstrip("0") in ("1", "2", "5")
    return step % every == 0 or is_early


WHO = "monitor"
R = TypeVar("R")
ON_ERROR = ("raise", "record")
LONG = 10.0
"""Seconds of a measurement from which a line on standard error says what took them."""
RESERVED = ("step", "seconds", "extra", "errors", "seed", "optimizer")
"""Names in a line or a header that are not those of sections."""


class Monitor:
    """Measures a model on fixed data while it is trained, and writes a line of JSON each time.

    Random states, modes, gradients and buffers are restored after a measurement, so that training is bitwise the same with and
    without a monitor.

    A run that resumes from a checkpoint makes its monitor with the same arguments and file. Its first line says at which step:
    readers drop measurements at and after that step, made before the interruption, so that they see one trajectory.

    Attributes:
        path: The file.
        parts: The model's parts, as norms and sharpness count them.

    >>> import tempfile
    >>> import torch
    >>> from hessiankit import Transformer
    >>> model = Transformer(11, 4, 5, 1)
    >>> tokens = torch.randint(11, (2, 6))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     monitor = Monitor(model, (tokens[:, :-1], tokens[:, 1:]), f"{folder}/run.jsonl", every=10, what=["norms"])
    ...     record = monitor.step(0)
    ...     monitor.step(1) is None, sorted(record)
    (True, ['loss', 'norms', 'seconds', 'step'])
    """

    @staticmethod
    def read(path: Path | str) -> MonitorLog:
        """Read the file that a monitor writes, also while it is being written; ``.plot()`` of the result draws it."""
        return MonitorLog.read(path)

    @checked("Monitor", sharded=True)
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        path: Path | str,
        *,
        every: int = 100,
        log_spaced: bool = False,
        what: Iterable[str] | Mapping[str, Mapping[str, Any]] = ("norms", "sharpness"),
        own: Mapping[str, Callable[[nn.Module, list[Any], int], Any]] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        parts: Sequence[Part] | None = None,
        seed: int = 0,
        log: Callable[..., Any] | None = None,
        on_error: str = "raise",
    ) -> None:
        """Check the arguments, and write the header of the file or compare it with the existing one.

        Args:
            model: Model that is trained; in the wrappers of torch.compile and DistributedDataParallel too. Of one that
                ``fully_shard`` has spread every rank makes a monitor and calls it, with its own data (``[]``: none): all get
                the numbers of all data, and rank 0 writes and logs them. It measures loss, ``"norms"`` and ``"sharpness"``.
            data: Batches to measure on, fixed for the run: a pair (inputs, labels), a Hugging Face batch with ``labels``, or an
                iterable of these, which is read once, here.
            path: File for a header and one line of JSON a measurement.
            every: Steps from one measurement to the next.
            log_spaced: Whether to measure at steps 1, 2, 5, 10, 20, 50, ... below ``every`` too.
            what: Measurements beside the loss, by name, or a mapping from names to options, e.g.
                ``{"norms": {}, "sharpness": {"draws": 8}}``. Names and options are those of the functions of
                :mod:`hessiankit.training.monitoring.measurements`: ``"norms"`` of the parameters; ``"sharpness"`` of every
                block type, with intervals; ``"eigenvalue"``, the largest of the Hessian; ``"preconditioned"``, the largest in the
                optimizer's metric, beside its threshold; ``"critical"``, the curvature along the optimizer's next step;
                ``"depth"``, diagnostics of the layers.
            own: Measurements of your own by name: functions of the model in evaluation mode, its batches (arguments and labels)
                and the step, which return plain numbers, or lists or dicts of them.
            optimizer: Optimizer that trains the model, or several; for ``"preconditioned"`` and ``"critical"``.
            parts: Parts of the model, for norms and sharpness; by default as :func:`hessiankit.sharpness` reads them.
            seed: Seed of label draws, which differ from step to step, and of start vectors.
            log: Function called as ``log(numbers, step=step)`` after every measurement, such as ``wandb.log``; the numbers are
                floats by name.
            on_error: ``"raise"`` stops at a section that fails, after writing the other sections; ``"record"`` writes the error
                into the line and goes on, and only warns where the file cannot be written.

        Raises:
            InputError: An argument does not fit, the file is of another run, or it cannot be written.
        """
        due(0, every)
        check_name(WHO, "on_error", on_error, ON_ERROR)
        self._model, self._every, self._log_spaced, self._on_error = bare(model), every, log_spaced, on_error
        self._ranks = ranks_of(self._model)
        if self._ranks is None:
            check_whole(WHO, self._model)
        with preserved_random_states(self._model):  # a DataLoader draws from torch's generator
            self._batches = batches_of(self._model, data) if self._ranks is None else self._ranks.batches(data)
        if parts is None and self._ranks is None:
            inputs, labels = on_device_of(self._model, self._batches[0])
            parts = parts_by_flow(self._model, inputs, len(labels))
        self.parts = tuple(model_parts(self._model) if parts is None else parts)
        optimizers = () if optimizer is None else listed(WHO, optimizer)
        run = MonitoredRun(self._model, self.parts, seed, optimizers, self._ranks)
        options: dict[str, Any] = {"seed": seed, **({"optimizer": name_of(optimizers)} if optimizers else {})}
        self._sections: dict[str, Section] = {}
        options_by_name = what if isinstance(what, Mapping) else {name: {} for name in what}
        for name, keywords in {"loss": {}, **options_by_name}.items():
            check_name(WHO, "what", name, MEASUREMENTS)
            if self._ranks is not None and name not in OVER_RANKS:
                raise InputError(f"{WHO}: {name!r} is measured of whole models, and this one is sharded; leave it out of what=")
            if not isinstance(keywords, Mapping):
                raise InputError(f"{WHO}: what={{{name!r}: {keywords!r}}}; expected a dict of options, such as {{}}")
            self._sections[name] = MEASUREMENTS[name](run, **keywords)
            options[name] = {**_defaults(MEASUREMENTS[name]), **keywords}
        if bool(optimizers) != any(name in self._sections for name in OF_OPTIMIZERS):
            optimizer_text = "an optimizer, which no measurement reads" if optimizers else "no optimizer"
            raise InputError(f"{WHO}: {optimizer_text}; pass optimizer= together with 'preconditioned' or 'critical' in what=")
        self._custom = dict(own or {})
        for name, measure in self._custom.items():
            if name in (*self._sections, *RESERVED):
                raise InputError(f"{WHO}: own={name!r} is the name of another part of a line; choose another")
            if not callable(measure):
                raise InputError(f"{WHO}: own={name!r} is a {type(measure).__name__}; pass a function of model, batches and step")
            self._sections[name], options[name] = partial(measure, self._model), "own"
        self._log = log
        header = {
            "model": type(self._model).__name__,
            "entries": sum(part.size for part in self.parts),
            "parts": [{"name": p.name, "type": p.type, "role": p.role, "layer": p.layer, "size": p.size} for p in self.parts],
            "data": digest(self._batches) if self._ranks is None else self._ranks.gather(digest(self._batches)),
            "sections": list(self._sections),
            "options": options,
            "environment": environment(),
        }
        self._lines: Lines = self._by_writer(partial(Lines, path, header), partial(Unwritten, path))
        self.path = self._lines.path
        self._at: int | None = None
        self._last_step: int | None = None

    def __repr__(self) -> str:
        return f"<Monitor: {', '.join(self._sections)} every {self._every} steps, into {self.path}>"

    def step(self, step: int, *, force: bool = False, **extra: Any) -> dict[str, Any] | None:
        """Measure and write if the step is scheduled; call it after every update, and with 0 before the first.

        Args:
            step: Updates done so far.
            force: Measure in any case, e.g. at the end of training.
            **extra: Numbers to write beside, e.g. ``learning_rate=...``; not read where nothing is measured.

        Raises:
            InputError: A section failed or the file cannot be written, and ``on_error="raise"``.

        Returns:
            What was measured, or None.
        """
        is_due = force or due(step, self._every, log_spaced=self._log_spaced)
        if self._at is None or step < self._at:  # training starts or goes on here
            self._lines.rewind(step)
        is_repeat = step == self._at == self._last_step
        self._at = step
        return self._measure(step, extra) if is_due and not is_repeat else None

    def measure(self, step: int, **extra: Any) -> dict[str, Any]:
        """Measure and write now: :meth:`step` with ``force=True``, except that a step measured already is measured anew."""
        self._lines.rewind(step)
        self._at = step
        return self._measure(step, extra)

    def _measure(self, step: int, extra: dict[str, Any]) -> dict[str, Any]:
        """Measure all sections, write the line and log the numbers; report where the time went if it was long."""
        if self._ranks is None:
            check_whole(WHO, self._model)
        record, failures, seconds = self._values(step)
        if sum(seconds.values()) > LONG and not isinstance(self._lines, Unwritten):
            durations = ", ".join(f"{name} {duration:.1f}" for name, duration in seconds.items())
            print(f"monitor: step {step} took {sum(seconds.values()):.1f} s ({durations})", file=sys.stderr, flush=True)
        record["seconds"] = seconds
        record |= {"extra": extra} if extra else {}
        record |= {"errors": {name: f"{type(e).__name__}: {e}" for name, e in failures.items()}} if failures else {}
        self._write(record)
        if self._log is not None and not isinstance(self._lines, Unwritten):
            self._log(scalars(record), step=step)
        if failures and self._on_error == "raise":
            name, error = next(iter(failures.items()))
            raise InputError(
                f"{WHO}: {name} at step {step} failed: {record['errors'][name]}. The rest of the measurement is in {self.path}; "
                f"{'mend your function' if name in self._custom else 'leave it out of what='}, or pass on_error='record' to go on"
            ) from error
        return record

    def _by_writer(self, work: Callable[[], R], others: Callable[[], R]) -> R:
        """Do something on the process that writes, and something else on the others; an error is one of all."""
        return work() if self._ranks is None else self._ranks.together(work if self._ranks.rank == 0 else others)

    def _values(self, step: int) -> tuple[dict[str, Any], dict[str, Exception], dict[str, float]]:
        """Return what the sections measure, the errors of those that failed, and the seconds of each."""
        record: dict[str, Any] = {"step": step}
        failures: dict[str, Exception] = {}
        seconds: dict[str, float] = {}
        batches: list[Any] = []
        with preserved_state(self._model), ordinary_path():
            for name, section in self._sections.items():
                start = time.perf_counter()
                try:
                    with nullcontext() if self._ranks is None else self._ranks.in_step():
                        batches = batches or [on_device_of(self._model, batch) for batch in self._batches]
                        record[name] = section(batches, step)
                except Exception as error:
                    failures[name] = error
                seconds[name] = round(time.perf_counter() - start, 4)
        self._last_step = step
        return record, failures, seconds

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._by_writer(partial(self._lines.append, record), lambda: None)
        except InputError as error:
            if self._on_error == "raise":
                raise
            warnings.warn(str(error), stacklevel=4)


def _defaults(make: Callable[..., Section]) -> dict[str, Any]:
    """Return the options of a measurement with their defaults."""
    return {p.name: p.default for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY}


def ranks_of(model: nn.Module) -> MonitorRanks | None:
    """Return the processes over which ``fully_shard`` has spread a model; None of a whole one."""
    if not is_sharded(model):
        return None
    from hessiankit.training.monitoring.over_ranks import MonitorRanks  # loads as long as torch itself

    return MonitorRanks(model)


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, DataParallel and DistributedDataParallel.

    >>> layer = nn.Linear(1, 1)
    >>> bare(nn.DataParallel(layer)) is layer
    True
    """
    inner: Any = model
    while isinstance(inner, nn.Module):
        model = inner
        parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        inner = model.module if parallel else getattr(model, "_orig_mod", None)
    return model
