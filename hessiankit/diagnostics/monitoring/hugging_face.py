"""A monitor for the ``Trainer`` of Hugging Face transformers (``pip install 'hessiankit[training]'``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessiankit.diagnostics.monitoring.callbacks import MonitorEvents, on_first_use
from hessiankit.support.errors import InputError


class TrainerEvents(MonitorEvents):
    """Follow a Hugging Face ``Trainer`` with a :class:`~hessiankit.diagnostics.monitoring.Monitor`.

    It measures as every :class:`~hessiankit.diagnostics.monitoring.callbacks.MonitorEvents`. Numbers go to ``Trainer.log``, which
    all its loggers see, if ``callback.trainer`` is set, else into ``state.log_history``.
    """

    def __init__(self, data: Any, path: Path | str, *, trainer: Any = None, **options: Any) -> None:
        """Keep the arguments of the monitor, ``log`` and ``last``; ``callback.trainer`` can be set later too."""
        super().__init__(data, path, **options)
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if model is None:
            raise InputError("SharpnessCallback: the trainer passes no model to its callbacks; use hessiankit.Monitor")
        self._begin(model, optimizer)
        self._step(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step(state, control, force=self._last)

    def _step(self, state: Any, control: Any, force: bool = False) -> None:
        extra = {} if state.epoch is None else {"epoch": state.epoch}
        numbers = self._numbers(state.global_step, force, **extra)
        if not numbers:
            return
        if self.trainer is None:
            state.log_history.append({**numbers, **extra, "step": state.global_step})
            return
        due = control.should_log  # Trainer.log resets the flag, and the trainer's own entry of this step would be lost
        self.trainer.log(numbers)
        control.should_log = due


if TYPE_CHECKING:
    SharpnessCallback = TrainerEvents
else:
    __getattr__ = on_first_use(globals(), TrainerEvents, "transformers", "TrainerCallback")
