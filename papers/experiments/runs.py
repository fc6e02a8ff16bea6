"""Training runs of language models and image classifiers: one loop for all experiments and figures, on one process or on many.

A run is a function of its description: the same description gives the same digits, also where it was interrupted and resumed, and
to rounding on another number of processes. Its folder has ``steps.jsonl``, a line a step, ``monitor.jsonl``, what the monitor
wrote, checkpoints while it runs, and, when it is finished, ``run.pt`` with the losses and the model at every step that is wanted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hessiankit.support.environment import code_version
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.training.monitoring import Monitor, MonitorLog
from hessiankit.training.monitoring.monitor import due
from papers.experiments.experts import auxiliary_loss
from papers.experiments.optimizers import optimizer_of, schedule_of
from papers.experiments.spec import Spec, model_of
from papers.experiments.store import NOTHING, differentiable, keep, plain, put, read, recall, recall_any, short_digest
from papers.experiments.tokens import data_digest, data_of
from papers.experiments.training import updates
from papers.experiments.tuning.experiment import cross_entropy, evaluated_at, has_diverged, held_out_loss, one_thread

CODE = ("hessiankit/blocks", "hessiankit/training", "hessiankit/cli/text.py", "papers/experiments")
"""What the digits of a run depend on."""
CPU = torch.device("cpu")
STEPS, MONITORED, FINISHED = "steps.jsonl", "monitor.jsonl", "run.pt"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        spec: Description of the run.
        folder: Folder of its files, the monitor's among them.
        models: State of the model after each step that was kept; where a run broke off, as it was there.
        steps: Steps of the evaluations, 0 first.
        losses: Held-out nats a token there; infinite from where the training loss was no number.
        train_losses: Nats a token of each step's batch, before its update.
        log: What the monitor measured; None without one.
        seconds: Time taken, measurements included.
    """

    spec: Spec
    folder: Path
    models: Mapping[int, Mapping[str, Tensor]]
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    train_losses: tuple[float, ...]
    log: MonitorLog | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether it ends half a nat above its own best, above a uniform guess, or with no number, as in ``papers tune-lr``."""
        return has_diverged(self.losses, self.spec.vocabulary)

    def model(self, step: int | None = None) -> Any:
        """Return the model after a step that was kept, the last one by default."""
        model = model_of(self.spec)
        model.load_state_dict(self.models[self.spec.steps if step is None else step])
        return model


@dataclass(frozen=True)
class Ranks:
    """Processes that share a run, as torchrun starts them, and how each holds the model.

    Attributes:
        rank: Number of this process.
        world: Number of processes; each takes its part of every batch.
        device: Device of this process.
        sharded: Whether each holds a part of the parameters (FSDP2) or all of them (DDP).
        recompute: Whether the backward pass computes the activations of a block again.
        micro: Sequences that a process takes at once; its part of the batch by default.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = CPU
    sharded: bool = False
    recompute: bool = False
    micro: int | None = None

    def mean(self, value: float) -> float:
        """Return the mean of a number over the processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            dist.barrier()

    def part(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this process's samples of a batch."""
        inputs, targets = (tensor[self.rank :: self.world].to(self.device) for tensor in pair)
        return inputs, targets

    def shared(self, model: Any) -> Any:
        """Return the model as the processes call it; its parameters are moved and sharded in place."""
        if self.recompute:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if not self.sharded:
            model.to(self.device)
            return nn.parallel.DistributedDataParallel(model) if self.world > 1 else model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a copy of the model's whole state in the memory of the CPU; all processes have to ask for it."""
        state = {name: tensor.full_tensor() if self.sharded and hasattr(tensor, "full_tensor") else tensor
                 for name, tensor in model.state_dict().items()}  # fmt: skip
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def ranks_of(device: str = "cpu", **options: Any) -> Ranks:
    """Return this process among those of torchrun, and join them; alone without torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return Ranks(rank, world, place, **options)


def kept_run(spec: Spec, out: Path, *, tell: Tell | None = None) -> Run:
    """Train below ``out/cache``, or return what was trained there before by the same code.

    Raises:
        InputError: The text or the folder cannot be used, or an option of the model does not fit.
    """
    made_by = f"{code_version(*CODE)}, {torch.get_default_dtype()}"
    identity = {"spec": plain(spec), "text": data_digest(spec), "made by": made_by}
    return train_run(spec, out / "cache" / f"run-{spec.name}-{short_digest(identity)}", tell=tell)


def train_run(spec: Spec, folder: Path, *, ranks: Ranks = Ranks(), every: int = 0, tell: Tell | None = None) -> Run:
    """Train in a folder, resume what was interrupted there, or return what is finished.

    Args:
        spec: The run.
        folder: Its folder.
        ranks: This process among those that share the run.
        every: Steps from one checkpoint to the next; 0 for none.
        tell: Where progress goes; a bar of its own by default.

    Raises:
        InputError: The folder holds another run, or the data or an option do not fit.
    """
    if tell is None:
        with progress_bar() if ranks.rank == 0 else nullcontext(lambda *_: None) as bar:
            return train_run(spec, folder, ranks=ranks, every=every, tell=bar)
    identity = {"spec": plain(spec), "text": data_digest(spec)}
    found = recall(folder / FINISHED, identity)
    if found is NOTHING:
        with differentiable(), one_thread() if ranks.device.type == "cpu" else nullcontext():
            found = _Training(spec, folder, identity, ranks, every, tell).finish()
        if ranks.rank == 0:
            keep(folder / FINISHED, identity, found)
        ranks.wait()
    return _run(spec, folder, found)


def read_run(folder: Path) -> Run:
    """Return a finished run, whatever code made it.

    Raises:
        InputError: There is none.
    """
    identity, found = recall_any(folder / FINISHED)
    return _run(Spec.of(identity["spec"]), folder, found)


def finished_in(folder: Path) -> list[Run]:
    """Return the finished runs below a folder, in the order of their paths."""
    return [read_run(file.parent) for file in sorted(folder.rglob(FINISHED))]


def _run(spec: Spec, folder: Path, found: Mapping[str, Any]) -> Run:
    if spec.every and read(folder / MONITORED) is None:
        put(folder / MONITORED, found["monitored"].encode())
    return Run(
        spec, folder, found["kept"], evaluated_at(spec.steps, spec.evaluations), tuple(found["losses"]),
        tuple(found["train_losses"]), MonitorLog.read(folder / MONITORED) if spec.every else None, found["seconds"],
    )  # fmt: skip


class _Training:
    """One run on the way: model, optimizer, draws, and what it showed so far."""

    def __init__(self, spec: Spec, folder: Path, identity: Any, ranks: Ranks, every: int, tell: Tell) -> None:
        self.spec, self.folder, self.identity, self.ranks, self.every, self.tell = spec, folder, identity, ranks, every, tell
        self.data, self.held_out = data_of(spec)
        if spec.batch_size % ranks.world or spec.windows % ranks.world:
            sizes = f"batches of {spec.batch_size} and {spec.windows} held-out sequences"
            raise InputError(f"train: {sizes} on {ranks.world} processes; expected numbers of processes that divide both")
        self.model = model_of(spec)
        if spec.precision == "bfloat16":
            self.model.forward = torch.autocast(ranks.device.type, torch.bfloat16)(self.model.forward)
        self.called = ranks.shared(self.model)
        self.optimizer = optimizer_of(
            self.model, spec.optimizer, spec.lr, spec.ratios, spec.weight_decay, spec.betas, spec.heads
        )  # fmt: skip
        if ranks.sharded and spec.optimizer in ("adam_mini", "muon"):
            raise InputError(f"train: {spec.optimizer} takes whole tensors, and sharded parameters are parts; leave out --shard")
        warm_up = round(spec.warm_up * spec.steps)
        self.schedule = schedule_of(
            self.optimizer, warmup=warm_up, steps=spec.steps, kind=spec.schedule, ramp=spec.ramp, final=spec.floor
        )
        self.draws = torch.Generator().manual_seed(spec.seed)
        self.done = 0
        self.shown: dict[str, Any] = {"losses": [], "train_losses": [], "kept": {}, "seconds": 0.0}
        self.windows = ranks.part(self.held_out.windows(spec.length, spec.windows))
        self._resume()
        self.copied = ranks.sharded or ranks.recompute or spec.precision == "bfloat16"  # a monitor reads plain modules
        self.watched = model_of(spec) if self.copied and spec.every else self.model
        self.monitor = self._monitor() if spec.every and ranks.rank == 0 else None

    def finish(self) -> dict[str, Any]:
        """Train to the end, and return what the run showed."""
        spec, ranks, began = self.spec, self.ranks, time.perf_counter() - self.shown["seconds"]
        if not self.done:
            self._look(0, {})
        self.tell(f"training {spec.name}", self.done, spec.steps)
        found = updates(
            self.called, self.optimizer, self._batch, self._loss, range(self.done + 1, spec.steps + 1),
            clip=spec.clip or math.inf, schedule=self.schedule, micro=ranks.micro, mean=ranks.mean,
        )  # fmt: skip
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for step, loss in found:
            self.shown["train_losses"].append(loss if math.isfinite(loss) else math.inf)
            if not math.isfinite(loss):
                break
            self.shown["seconds"] = round(time.perf_counter() - began, 2)
            self._look(step, {"loss": loss, "lr": max(rates), "tokens": step * spec.batch_size * spec.length})
            rates = [group["lr"] for group in self.optimizer.param_groups]
            if self.every and step % self.every == 0 and step < spec.steps:
                self._keep(step)
            if step < spec.steps:
                self.tell(f"training {spec.name}", step, spec.steps)
        for step in {*spec.kept, spec.steps} - self.shown["kept"].keys():  # the run broke off before
            self.shown["kept"][step] = ranks.state(self.model)
        losses = [loss if math.isfinite(loss) else math.inf for loss in self.shown["losses"]]
        self._forget(math.inf)
        return {
            **self.shown, "losses": losses + [math.inf] * (len(evaluated_at(spec.steps, spec.evaluations)) - len(losses)),
            "monitored": (read(self.folder / MONITORED) or b"").decode(), "seconds": round(time.perf_counter() - began, 2),
        }  # fmt: skip

    def _batch(self) -> tuple[Tensor, Tensor]:
        return self.ranks.part(self.data.batch(self.spec.batch_size, self.spec.length, self.draws))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.float(), targets) + auxiliary_loss(self.model)

    def _look(self, step: int, line: dict[str, Any]) -> None:
        """Measure what is due after a step, and write its line."""
        spec, shown = self.spec, self.shown
        last = step == spec.steps
        if spec.every and self.copied and (last or due(step, spec.every, log_spaced=spec.log_spaced)):
            self.watched.load_state_dict(self.ranks.state(self.model))
        if self.monitor is not None:
            _measure(self.monitor, step, force=last)
        if step in evaluated_at(spec.steps, spec.evaluations):
            shown["losses"].append(self.ranks.mean(held_out_loss(self.called, self.windows)))
            line["held_out"] = shown["losses"][-1]
        if step in (*spec.kept, spec.steps):
            shown["kept"][step] = self.ranks.state(self.model)
        if self.ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / STEPS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **line, "seconds": shown["seconds"]}) + "\n")

    def _file(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}-{self.ranks.rank if self.ranks.sharded else 0}.pt"

    def _keep(self, step: int) -> None:
        """Write a checkpoint; the one before is removed as soon as every process has written its own."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "draws": self.draws.get_state()}
        state |= {"schedule": self.schedule.state_dict(), "shown": self.shown}
        if self.ranks.sharded or self.ranks.rank == 0:
            keep(self._file(step), self.identity, state)
        self.ranks.wait()
        self._forget(step)

    def _forget(self, before: float) -> None:
        """Remove checkpoints of earlier steps."""
        for file in self.folder.glob("checkpoint-*.pt") if self.ranks.rank == 0 else ():
            if int(file.stem.split("-")[1]) < before:
                file.unlink()

    def _resume(self) -> None:
        """Go back to the last step of which every process has a checkpoint, and drop the lines after it."""
        parts = [tuple(map(int, file.stem.split("-")[1:])) for file in self.folder.glob("checkpoint-*.pt")]
        needed = set(range(self.ranks.world if self.ranks.sharded else 1))
        whole = [step for step in {step for step, _ in parts} if {rank for at, rank in parts if at == step} >= needed]
        if whole:
            self.done = max(whole)
            state = recall(self._file(self.done), self.identity, exclusive=False)
            if state is NOTHING:
                raise InputError(f"train: {self._file(self.done)} is of another run; remove its folder, or pass another")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.draws.set_state(state["draws"])
            self.shown = state["shown"]
        if self.ranks.rank == 0:
            lines = (read(self.folder / STEPS) or b"").decode().splitlines(keepends=True)
            before = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.done] if whole else []
            put(self.folder / STEPS, "".join(before).encode())
            if self.spec.every and not whole:
                put(self.folder / MONITORED, b"")
        self.ranks.wait()

    def _monitor(self) -> Monitor:
        spec = self.spec
        what: dict[str, dict[str, Any]] = {name: {} for name in ("norms", "sharpness", "eigenvalue") if name in spec.measured}
        if "sharpness" in what:
            what["sharpness"]["draws"] = spec.draws
        if depth := tuple(name for name in spec.measured if name not in what):
            what["depth"] = {"what": depth}
        return Monitor(
            self.watched, measured_on(spec), self.folder / MONITORED, every=spec.every, log_spaced=spec.log_spaced, what=what,
            seed=spec.seed, on_error="record",
        )  # fmt: skip


def measured_on(spec: Spec) -> list[tuple[Tensor, Tensor]]:
    """Return the monitor's batches: windows of the held-out data, other ones for each batch, evenly spread."""
    inputs, targets = data_of(spec)[1].windows(spec.length, spec.batches * spec.batch_size)
    rows = [slice(k, None, spec.batches) for k in range(spec.batches)]
    return [(inputs[r], targets[r]) for r in rows]


def _measure(monitor: Monitor, step: int, *, force: bool) -> None:
    """Measure where it is time; a measurement that could not be written ends the run, since a later one would not bring it back.

    Raises:
        InputError: The file cannot be written.
    """
    if monitor.step(step, force=force) is None:
        return
    last = json.loads((read(monitor.path) or b"{}").splitlines()[-1])
    if last.get("step") != step:
        raise InputError(
            f"train: cannot write {monitor.path}: it lacks step {step}; make room, or pass another folder with --out"
        )
