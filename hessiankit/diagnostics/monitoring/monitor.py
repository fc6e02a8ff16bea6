"""A monitor of one training run: it measures the model at some steps and writes a line of JSON each time."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hessiankit.diagnostics.depth import QUANTITIES
from hessiankit.diagnostics.digest import digest
from hessiankit.diagnostics.monitoring import measurements
from hessiankit.diagnostics.monitoring.lines import Lines
from hessiankit.diagnostics.monitoring.log import MonitorLog
from hessiankit.diagnostics.monitoring.measurements import ROUTES, batches_of
from hessiankit.diagnostics.sharpness.options import PER, parts_by_flow
from hessiankit.engine.problem.batches import on_device_of
from hessiankit.landscape.critical import PASSES
from hessiankit.landscape.optimizer_states import listed, name_of
from hessiankit.partition import Part
from hessiankit.support.arguments import checked
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.torch_state import ordinary_path, preserved_random_states, preserved_state


def due(step: int, every: int, *, log_spaced: bool = False) -> bool:
    """Return whether a step is measured: multiples of ``every``, and with ``log_spaced`` also 1, 2, 5, 10, 20, 50, ... below it.

    >>> [step for step in range(101) if due(step, 50, log_spaced=True)]
    [0, 1, 2, 5, 10, 20, 50, 100]
    """
    if every < 1:
        raise InputError(f"monitor: every={every} measures at no step; pass 1 or more")
    if step < 0:
        raise InputError(f"monitor: step={step}; expected the number of updates done, 0 or more")
    early = log_spaced and step < every and str(step).rstrip("0") in ("1", "2", "5")
    return step % every == 0 or early


WHO = "monitor"
ON_ERROR = ("raise", "record")
LONG = 10.0
"""Seconds of a measurement from which a line on standard error says what took them."""
Section = Callable[[nn.Module, list[Any], int], Any]
TAKEN = ("step", "seconds", "time", "extra", "errors", "share", "seed")
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
    ...     monitor = Monitor(model, (tokens[:, :-1], tokens[:, 1:]), f"{folder}/run.jsonl", every=10, sharpness=False)
    ...     record = monitor.step(0)
    ...     monitor.step(1) is None, sorted(record)
    (True, ['loss', 'norms', 'seconds', 'step'])
    """

    @staticmethod
    def read(path: Path | str) -> MonitorLog:
        """Read the file that a monitor writes, also while it is being written; ``.plot()`` of the result draws it."""
        return MonitorLog.read(path)

    @checked("Monitor")
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        path: Path | str,
        target: Tensor | None = None,
        *,
        every: int = 100,
        log_spaced: bool = False,
        sharpness: bool = True,
        norms: bool = True,
        eigenvalue: bool = False,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        preconditioned: bool = True,
        critical: bool = True,
        depth: Sequence[str] = (),
        own: Mapping[str, Section] | None = None,
        share: float | None = None,
        draws: int = 4,
        seed: int = 0,
        per: str = "token",
        micro_batch: int | None = None,
        parts: Sequence[Part] | None = None,
        eigenvalue_route: str = "auto",
        eigenvalue_tol: float = 1e-3,
        eigenvalue_products: int = 60,
        warm_starts: bool = True,
        on_error: str = "raise",
    ) -> None:
        """Check the arguments, and write the header of the file or compare with the one that is there.

        Args:
            model: The model that is trained; in the wrappers of torch.compile and DistributedDataParallel too.
            data: The batches to measure on, the same at every step: a pair (inputs, labels), a Hugging Face batch with
                ``labels``, or an iterable of these, which is read once, here.
            path: The file; one line of JSON a measurement, after a header.
            target: Labels, if ``data`` are inputs only.
            every: Steps from one measurement to the next.
            log_spaced: Measure at steps 1, 2, 5, 10, 20, 50, ... below ``every`` too.
            sharpness: Whether to estimate the average sharpness of every block type, with intervals.
            norms: Whether to take the norms of the parameters.
            eigenvalue: Whether to find the top eigenvalue of the Hessian of the loss: up to ``eigenvalue_products`` products.
            optimizer: The optimizer that trains the model, or several, for the next two; None: neither is measured.
            preconditioned: Whether to find the top eigenvalue of the Hessian in the optimizer's metric, beside its stability
                threshold, as :func:`hessiankit.spectrum` reads both; with the options of ``eigenvalue``.
            critical: Whether to measure the curvature along the optimizer's next step on these data, and the multiple of the
                step that does not raise the loss, as :func:`hessiankit.critical_sharpness`.
            depth: Which depth diagnostics to take, some of :data:`hessiankit.diagnostics.depth.QUANTITIES`, such as
                ``("variance", "angles", "drop")``.
            own: Measurements of your own by name: functions of the model in evaluation mode, its batches (arguments and labels)
                and the step, which return plain numbers, or lists or dicts of them.
            share: Measurements may take this share of the time since the first step, measurements included; None: no limit.
                After the first, sections are measured that fit by their last time, those of longest ago first, with one whole
                measurement in reserve for a forced one at the end. A line says which steps and sections were left out.
            draws: Label draws of the sharpness.
            seed: Of label draws, which differ from step to step, and of the start vector of the eigenvalue.
            per: Term of the sharpness: ``"token"`` or ``"sequence"``.
            micro_batch: Sequences of one backward pass of the sharpness.
            parts: The model's parts; by default as :func:`hessiankit.sharpness` reads them.
            eigenvalue_route: See :func:`hessiankit.diagnostics.monitoring.measurements.eigenvalue`.
            eigenvalue_tol: Its residual, relative to it.
            eigenvalue_products: Products with the Hessian at most.
            warm_starts: Whether the search for a top eigenvalue starts from the last eigenvector, with a tenth of a random one
                added. The eigenvector is not in the file: a run that resumes searches from a random one at first.
            on_error: ``"raise"`` stops at a section that fails, after writing the other sections; ``"record"`` writes the error
                into the line and goes on, and only warns where the file cannot be written.

        Raises:
            InputError: An argument does not fit, the file is of another run, or it cannot be written.
        """
        due(0, every)
        check_name(WHO, "per", per, PER)
        check_name(WHO, "eigenvalue_route", eigenvalue_route, ROUTES)
        check_name(WHO, "on_error", on_error, ON_ERROR)
        if share is not None and not 0 < share < 1:
            raise InputError(f"{WHO}: share={share} is no share of the time; pass a number between 0 and 1, or None")
        self._model, self._every, self._log_spaced, self._on_error = bare(model), every, log_spaced, on_error
        with preserved_random_states(self._model):  # a DataLoader draws from torch's generator
            self._batches = batches_of(self._model, data, target)
        inputs, labels = on_device_of(self._model, self._batches[0])
        self.parts = tuple(parts_by_flow(self._model, inputs, len(labels)) if parts is None else parts)
        for name in depth:
            check_name(WHO, "depth", name, QUANTITIES)
        draw = {"draws": draws, "per": per, "micro_batch": micro_batch}
        optimizers = () if optimizer is None else listed(optimizer)
        find = {"route": eigenvalue_route, "tol": eigenvalue_tol, "products": eigenvalue_products}
        searched = {**find, "warm": warm_starts}
        self._sections: dict[str, Section] = {"loss": measurements.loss}
        options: dict[str, Any] = {"seed": seed}

        def add(name: str, measure: Callable[..., Any], noted: Any, **arguments: Any) -> None:
            """Measure a section with some arguments, and write its options into the header."""
            self._sections[name] = partial(measure, **arguments)
            options.update({} if noted is None else {name: noted})

        if norms:
            add("norms", measurements.norms, None, parts=self.parts)
        if sharpness:
            add("sharpness", measurements.sharpness, draw, parts=self.parts, seed=seed, **draw)
        if eigenvalue:
            add("eigenvalue", measurements.eigenvalue, searched, seed=seed, last={} if warm_starts else None, **find)
        if optimizers and preconditioned:
            of = {**searched, "optimizer": name_of(optimizers)}
            metric: dict[str, Any] = {"optimizers": optimizers, "last": {} if warm_starts else None}
            add("preconditioned", measurements.eigenvalue, of, seed=seed, **metric, **find)
        if optimizers and critical:
            steps = {"optimizer": name_of(optimizers), "passes": PASSES}
            add("critical", measurements.critical, steps, optimizers=optimizers, passes=PASSES)
        if depth:
            add("depth", measurements.depth, list(depth), what=tuple(depth), seed=seed, micro_batch=micro_batch)
        self._own = dict(own or {})
        for name, measure in self._own.items():
            if name in (*self._sections, *TAKEN):
                raise InputError(f"{WHO}: own={name!r} is the name of another part of a line; choose another")
            add(name, measure, "own")
        if share is not None:
            options["share"] = share
        self._share, self._spent, self._skipped = share, 0.0, list[int]()
        self._began: float | None = None
        self._due = self._overhead = 0.0  # when a step was due last; what a measurement takes beside its sections
        self._times = dict.fromkeys(self._sections, 0.0)  # the last of each section
        self._turns = dict.fromkeys(self._sections, 0)  # how often each was measured
        header = {
            "model": type(self._model).__name__,
            "entries": sum(part.size for part in self.parts),
            "parts": [{"name": p.name, "type": p.type, "role": p.role, "layer": p.layer, "size": p.size} for p in self.parts],
            "data": digest(self._batches),
            "options": options,
            "environment": environment(),
        }
        self._lines = Lines(path, header)
        self.path = self._lines.path
        self._at: int | None = None
        self._measured: int | None = None

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
        wanted = force or due(step, self._every, log_spaced=self._log_spaced)
        if self._at is None or step < self._at:  # training starts or goes on here
            self._lines.rewind(step)
        repeated = step == self._at == self._measured
        self._at = step
        if not wanted or repeated:
            return None
        names = self._affordable(force)
        if not names:
            self._skipped += [step] if step not in self._skipped else []
            return None
        return self._measure(step, extra, names)

    def measure(self, step: int, **extra: Any) -> dict[str, Any]:
        """Measure and write now: :meth:`step` with ``force=True``, except that a step measured already is measured anew."""
        self._lines.rewind(step)
        self._at = step
        return self._measure(step, extra, tuple(self._sections))

    def _affordable(self, force: bool) -> tuple[str, ...]:
        """Return the sections with which measurements take no more than their share of the time; a forced step has the loss."""
        now, before = time.perf_counter(), self._due
        self._due = now
        if self._began is None:
            self._began = now
            return tuple(self._sections)
        if self._share is None:
            return tuple(self._sections)
        room = (self._share * (now - self._began) - self._spent) / (1 - self._share) - self._overhead
        if not force:
            room -= sum(self._times.values()) + self._overhead
        chosen: list[str] = []
        waiting = False
        for name in sorted(self._sections, key=self._turns.__getitem__):
            if self._times[name] <= room:
                chosen.append(name)
                room -= self._times[name]
            elif not (waiting or force):
                waiting, room = True, min(room, self._share * (now - before) / 2)
        return tuple(name for name in self._sections if name in chosen or (force and name == "loss"))

    def _measure(self, step: int, extra: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Measure some sections and write the line; say what took the time if it was long."""
        _check_whole(self._model)
        began = time.perf_counter()
        try:
            record, failed = self._values(step, names)
            if self._share is not None:
                record["time"] = self._time(began, names, sum(record["seconds"].values()))
            record |= {"extra": extra} if extra else {}
            record |= {"errors": {name: f"{type(e).__name__}: {e}" for name, e in failed.items()}} if failed else {}
            self._write(record)
        finally:
            taken = time.perf_counter() - began
            self._spent += taken
            if taken > LONG:
                each = ", ".join(f"{name} {self._times[name]:.1f}" for name in names if name in self._times)
                print(f"monitor: step {step} took {taken:.1f} s ({each})", file=sys.stderr, flush=True)
        if failed and self._on_error == "raise":
            name, error = next(iter(failed.items()))
            remedy = f"leave this out with {name}={'()' if name == 'depth' else 'False'}"
            raise InputError(
                f"{WHO}: {name} at step {step} failed: {record['errors'][name]}. The rest of the measurement is in {self.path}; "
                f"{'mend your function' if name in self._own else remedy}, or pass on_error='record' to go on"
            ) from error
        return record

    def _values(self, step: int, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Return the line with what sections measure and the seconds that they took, and the errors of those that failed."""
        record: dict[str, Any] = {"step": step}
        failed: dict[str, Exception] = {}
        batches: list[Any] = []
        with preserved_state(self._model), ordinary_path():
            for name in names:
                start = time.perf_counter()
                try:
                    batches = batches or [on_device_of(self._model, batch) for batch in self._batches]
                    record[name] = self._sections[name](self._model, batches, step)
                except Exception as error:
                    failed[name] = error
                self._times[name] = round(time.perf_counter() - start, 4)
                self._turns[name] += 1
        self._measured = step
        return {**record, "seconds": {name: self._times[name] for name in names}}, failed

    def _time(self, began: float, names: Sequence[str], of_sections: float) -> dict[str, Any]:
        """Return what measurements have taken of the time, and what was left out for it since the last line."""
        now, skipped = time.perf_counter(), self._skipped
        self._overhead, self._skipped = now - began - of_sections, []
        return {
            "measuring": round(self._spent + now - began, 4),
            "since_start": round(now - (began if self._began is None else self._began), 4),
            "skipped": skipped,
            "left_out": [name for name in self._sections if name not in names],
        }

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._lines.append(record)
        except InputError as error:
            if self._on_error == "raise":
                raise
            warnings.warn(str(error), stacklevel=4)


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


def _check_whole(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise InputError(
                f"{WHO}: {name!r} is sharded over several processes, and one of them does not see all of it; "
                "measure with hessiankit.diagnostics.distributed, or on a gathered copy"
            )
