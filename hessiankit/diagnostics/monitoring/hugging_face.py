"""A monitor for the ``Trainer`` of Hugging Face transformers (``pip install 'hessiankit[training]'``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessiankit.diagnostics.monitoring.following import on_first_use, scalars
from hessiankit.diagnostics.monitoring.monitor import Monitor
from hessiankit.support.errors import InputError


class TrainerEvents:
    """Follow a Hugging Face ``Trainer`` with a :class:`~hessiankit.diagnostics.monitoring.Monitor`.

    It measures before the first update, when the monitor's schedule says so, and after the last update; only in process zero,
    where the others wait, so a measurement has to be quicker than the time-out of the process group. A run that goes on from a
    checkpoint goes on in the same file. Numbers go to the trainer's own log too: through ``Trainer.log``, which all its
    loggers see, if ``callback.trainer`` is set, else into ``state.log_history``.

    Attributes:
        monitor: The monitor, from the start of training on.
        trainer: The trainer whose log to write to, or None.
    """

    def __init__(
        self, data: Any, path: Path | str, *, trainer: Any = None, log: bool = True, last: bool = True, **options: Any
    ) -> None:
        """Keep what the monitor will be made of.

        Args:
            data: The batches to measure on, e.g. a few that the data collator made of the validation set.
            path: The file.
            trainer: The trainer, for its log; or set ``callback.trainer`` later.
            log: Whether to write into the trainer's log too.
            last: Whether to measure after the last update in any case.
            **options: Of :class:`~hessiankit.diagnostics.monitoring.Monitor`.
        """
        self.data, self.path, self.trainer, self.options = data, path, trainer, options
        self.monitor: Monitor | None = None
        self._log, self._last = log, last

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if model is None:
            raise InputError("SharpnessCallback: the trainer passes no model to its callbacks; use hessiankit.Monitor")
        self.monitor = Monitor(model, self.data, self.path, **self.options)
        self._step(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(state, control, force=self._last)

    def _step(self, state: Any, control: Any, force: bool = False) -> None:
        if self.monitor is None:
            return
        extra = {} if state.epoch is None else {"epoch": state.epoch}
        record = self.monitor.step(state.global_step, force=force, **extra)
        if record is None or not self._log:
            return
        if self.trainer is None:
            state.log_history.append({**scalars(record), **extra, "step": state.global_step})
            return
        wanted = control.should_log  # Trainer.log takes the flag down, and the trainer's own entry of this step would be lost
        self.trainer.log(scalars(record))
        control.should_log = wanted


if TYPE_CHECKING:
    SharpnessCallback = TrainerEvents
else:
    __getattr__ = on_first_use(globals(), TrainerEvents, "transformers", "TrainerCallback")
