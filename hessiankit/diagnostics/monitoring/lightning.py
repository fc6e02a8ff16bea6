"""A monitor for the ``Trainer`` of Lightning (``pip install 'hessiankit[training]'``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hessiankit.diagnostics.monitoring.callbacks import MonitorEvents, on_first_use


class LightningEvents(MonitorEvents):
    """Follow a Lightning ``Trainer`` with a :class:`~hessiankit.diagnostics.monitoring.Monitor`.

    It measures as every :class:`~hessiankit.diagnostics.monitoring.callbacks.MonitorEvents`; steps are ``trainer.global_step``:
    updates, not batches. Numbers go to the trainer's loggers at their step, and to ``trainer.callback_metrics``.
    """

    def __init__(
        self, data: Any, path: Path | str, *, model: str | Callable[[Any], nn.Module] | None = None, **options: Any
    ) -> None:
        """Keep the arguments of the monitor, ``log`` and ``last``.

        Args:
            data: The batches to measure on.
            path: The file.
            model: Which module to measure: the name of an attribute of the ``LightningModule``, or a function of it; by default
                the ``LightningModule`` itself, whose ``forward`` then returns logits.
            **options: Others of :class:`~hessiankit.diagnostics.monitoring.callbacks.MonitorEvents`.
        """
        super().__init__(data, path, **options)
        self.model = model

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        model = self.model(pl_module) if callable(self.model) else pl_module
        if isinstance(self.model, str):
            model = pl_module.get_submodule(self.model)
        self._begin(model, next(iter(trainer.optimizers), None))
        self._step(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = self._step(trainer)
        if numbers:  # the loggers have them already, at the right step; self.log would wait for log_every_n_steps
            pl_module.log_dict(numbers, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._step(trainer, force=self._last)

    def _step(self, trainer: Any, force: bool = False) -> dict[str, float]:
        numbers = self._numbers(trainer.global_step, force, epoch=trainer.current_epoch)
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=trainer.global_step)
        return numbers


if TYPE_CHECKING:
    SharpnessCallback = LightningEvents
else:
    __getattr__ = on_first_use(globals(), LightningEvents, "lightning", "Callback")
