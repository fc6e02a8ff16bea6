"""The training loop of all experiments and figures, and a small classifier trained by it with checkpoints.

A run of :func:`train` is a function of the model, the data and the seed. Stopping it, by Ctrl-C or on purpose, and going on from
its checkpoint gives the same digits as never having stopped.
"""

from __future__ import annotations

import io
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.support.errors import InputError, check_name
from hessiankit.support.files import make_folder, write_bytes
from hessiankit.support.progress import progress_bar
from hessiankit.support.torch_state import evaluation_mode
from papers.experiments.images import one_hot_target

CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class TrainingResult:
    """What a training run did.

    Attributes:
        losses: Training loss of each step, on that step's batch and before its update.
        train_accuracy: Fraction of the training inputs classified rightly at the end; None without class labels.
        validation_accuracy: The same on the validation pair; None without one.
        steps: Steps done in all, those before a resumption included.
        seconds: Time they took, likewise.
        interrupted: Whether Ctrl-C ended the run before its last step.
    """

    losses: tuple[float, ...]
    train_accuracy: float | None
    validation_accuracy: float | None
    steps: int
    seconds: float
    interrupted: bool = False

    def __str__(self) -> str:
        parts = [f"{self.steps} steps in {self.seconds:.1f} s"]
        if self.losses:
            parts.append(f"loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g}")
        for name, accuracy in (("training", self.train_accuracy), ("validation", self.validation_accuracy)):
            if accuracy is not None:
                parts.append(f"{name} accuracy {accuracy:.1%}")
        return ", ".join(parts) + (" (interrupted)" if self.interrupted else "")


def updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: Iterable[int],
    *,
    clip: float = math.inf,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[tuple[int, float]]:
    """Update a model in place, and yield (step, loss of its batch before the update) after each update.

    Where a loss is not finite it is yielded without an update, and the run ends.

    ``clip`` bounds the norm of the gradient; the schedule is stepped after each update.
    """
    for step in steps:
        inputs, targets = batch()
        scalar = loss(model(inputs), targets)
        value = float(scalar.detach())
        if math.isfinite(value):
            optimizer.zero_grad(set_to_none=True)
            scalar.backward()
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        yield step, value
        if not math.isfinite(value):
            return


def torch_bytes(content: Any) -> bytes:
    """Return the bytes of a file of ``torch.save``, whose own writing of files hides why a disk refused."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: str = "cross_entropy",
    steps: int = 300,
    batch_size: int = 128,
    lr: float = 3e-3,
    weight_decay: float = 0.0,
    seed: int = 0,
    progress: bool = True,
    validation: tuple[Tensor, Tensor] | None = None,
    checkpoint: Path | str | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> TrainingResult:
    """Train ``model`` in place with AdamW.

    An epoch is one random order of the samples, cut into batches; a last batch smaller than ``batch_size`` is left
    out of that epoch.

    Args:
        model: Maps a batch of inputs to logits ``(B, C)`` (or ``(B, ..., C)``).
        inputs: ``(N, ...)``.
        targets: Class labels ``(N,)`` (or ``(N, ...)``), or floating targets of the model's output shape.
        loss: ``"cross_entropy"``, the mean over samples, or ``"mse"``, (1/(B C)) sum (f - t)^2, the mean over all
            entries, with labels as one-hot rows.
        steps: Number of updates in all.
        batch_size: Samples an update; all of them if there are fewer.
        lr: Learning rate, constant.
        weight_decay: AdamW's decoupled weight decay.
        seed: Draws the batches, and dropout masks where the model has any. The caller's random state is left alone.
        progress: Whether to show a bar on a terminal's standard error.
        validation: Inputs and targets to measure the accuracy on at the end.
        checkpoint: A file to save the run to, every 100 steps, at the end, and on Ctrl-C. If it exists the run goes on
            from it.
        callback: Called after each update with the number of updates done and the loss.

    Raises:
        InputError: An argument does not fit, the checkpoint is of another run, or the loss is not finite.

    >>> model = nn.Linear(1, 2)
    >>> x = torch.linspace(-1, 1, 20).reshape(-1, 1)
    >>> train(model, x, (x[:, 0] > 0).long(), steps=200, lr=0.1).train_accuracy
    1.0
    """
    _check(model, inputs, targets, loss, steps, batch_size)
    if validation is not None and validation[0].shape[:1] != validation[1].shape[:1]:
        raise InputError(f"train: {len(validation[0])} validation inputs but {len(validation[1])} validation targets")
    settings = {
        "loss": loss, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay, "seed": seed, "samples": len(inputs),
        "parameters": [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()],
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    batches = _Batches(len(inputs), min(batch_size, len(inputs)), seed)
    run = _Run(model, optimizer, batches, settings, None if checkpoint is None else Path(checkpoint))
    with torch.random.fork_rng(devices=run.cuda), evaluation_mode(model):
        torch.manual_seed(seed)
        run.resume(steps)
        model.train()
        with progress_bar() if progress else nullcontext(lambda *_: None) as tell, _ctrl_c() as stopped:
            left = itertools.takewhile(lambda _: not stopped.is_set(), range(len(run.losses) + 1, steps + 1))
            for step, value in updates(model, optimizer, lambda: batches.of(inputs, targets), LOSS_FUNCTIONS[loss], left):
                if not math.isfinite(value):
                    raise InputError(
                        f"train: the loss became {value} at step {step}; lower the learning rate (now {lr:g}) or look for values "
                        "that are not finite in the inputs"
                    )
                run.losses.append(value)
                tell(f"training, loss {value:.4f}", step, steps)
                if callback is not None:
                    callback(step, value)
                if step % CHECKPOINT_EVERY == 0 and step < steps:
                    run.save()
        optimizer.zero_grad(set_to_none=True)
        run.save()
    return TrainingResult(
        losses=tuple(run.losses),
        train_accuracy=accuracy(model, inputs, targets),
        validation_accuracy=None if validation is None else accuracy(model, *validation),
        steps=len(run.losses),
        seconds=run.seconds,
        interrupted=len(run.losses) < steps,
    )


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int = 1024) -> float | None:
    """Return the fraction of inputs whose largest logit is at the label, in evaluation mode; None for other targets.

    >>> accuracy(nn.Identity(), torch.eye(2), torch.tensor([0, 0]))
    0.5
    """
    if targets.is_floating_point():
        return None
    with torch.no_grad(), evaluation_mode(model):
        pairs = zip(inputs.split(batch_size), targets.split(batch_size), strict=True)
        right = sum(int((model(x).argmax(-1) == t).sum()) for x, t in pairs)
    return right / targets.numel()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        raise InputError("train: loss='cross_entropy' needs class labels; pass whole numbers, or loss='mse' for these targets")
    if logits.shape[:-1] != targets.shape:
        raise InputError(
            f"train: logits {tuple(logits.shape)} do not fit labels {tuple(targets.shape)}; expected (B, C) and (B,)"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    if not targets.is_floating_point():
        targets = one_hot_target(targets, outputs.shape[-1], outputs.dtype)
    if outputs.shape != targets.shape:
        raise InputError(f"train: outputs {tuple(outputs.shape)} do not fit targets {tuple(targets.shape)}; expected the same")
    return F.mse_loss(outputs, targets)


LOSS_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": _cross_entropy, "mse": _mse}


def _check(model: nn.Module, inputs: Tensor, targets: Tensor, loss: str, steps: int, batch_size: int) -> None:
    check_name("train", "loss", loss, LOSS_FUNCTIONS)
    if len(inputs) != len(targets) or not len(inputs):
        raise InputError(f"train: {len(inputs)} inputs but {len(targets)} targets; expected one for each, and at least one")
    if steps < 0 or batch_size < 1:
        raise InputError(f"train: steps={steps} and batch_size={batch_size}; expected at least 0 and 1")
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError("train: the model has no parameters")
    if inputs.is_floating_point() and (inputs.dtype, inputs.device) != (parameter.dtype, parameter.device):
        raise InputError(
            f"train: inputs are {inputs.dtype} on {inputs.device}, the model is {parameter.dtype} on {parameter.device}; "
            f"convert one of them with .to(...)"
        )


class _Batches:
    """Rows of one batch after the other: each epoch a fresh order, drawn by its own generator."""

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self.samples, self.size, self.position = samples, size, samples
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)

    def of(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next batch."""
        if self.position + self.size > self.samples:
            self.order, self.position = torch.randperm(self.samples, generator=self.generator), 0
        self.position += self.size
        rows = self.order[self.position - self.size : self.position].to(inputs.device)
        return inputs[rows], targets[rows]

    def state(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position, "generator": self.generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]
        self.generator.set_state(state["generator"])


class _Run:
    """The state of a run, which a checkpoint saves and restores."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: _Batches, settings: dict[str, Any], path: Path | None
    ) -> None:
        self.model, self.optimizer, self.batches, self.settings, self.path = model, optimizer, batches, settings, path
        self.cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        self.losses: list[float] = []
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def save(self) -> None:
        """Write the checkpoint as a whole: where that fails, the earlier one is still there."""
        if self.path is None:
            return
        content = {
            "settings": self.settings, "losses": self.losses, "seconds": self.seconds, "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(), "batches": self.batches.state(), "random": torch.get_rng_state(),
            "cuda_random": [torch.cuda.get_rng_state(index) for index in self.cuda],
        }  # fmt: skip
        make_folder("train", self.path.parent)
        write_bytes("train", self.path, torch_bytes(content), remedy="make room, or name another file")

    def resume(self, steps: int) -> None:
        """Restore the state from the checkpoint, if there is one of this run."""
        if self.path is None or not self.path.exists():
            return
        ask = "name another file"
        try:
            content = torch.load(self.path, weights_only=True, map_location="cpu")
            seen, losses = content["settings"], content["losses"]
        except Exception as error:  # a damaged archive may raise anything
            raise InputError(f"train: {self.path} is not a checkpoint ({type(error).__name__}); delete it or {ask}") from error
        pairs = [(key, seen.get(key), value) for key, value in self.settings.items()]
        different = [f"{key} {there!r} there, {here!r} here" for key, there, here in pairs if there != here]
        if different:
            raise InputError(f"train: the checkpoint {self.path} is of another run: {'; '.join(different)}; {ask}")
        if len(losses) > steps:
            raise InputError(f"train: the checkpoint {self.path} is at step {len(losses)}, past steps={steps}; {ask}")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.batches.load(content["batches"])
        self.losses, self.start = list(losses), time.perf_counter() - content["seconds"]
        torch.set_rng_state(content["random"])
        for index, state in zip(self.cuda, content["cuda_random"], strict=True):
            torch.cuda.set_rng_state(state, index)


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, so that no update is cut in half; the second one interrupts as ever."""
    stopped = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield stopped
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            previous(number, frame)
        stopped.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)
