"""Small byte-level language models, trained and followed by a monitor once for all figures that read of them.

A run is a function of its description: the same description gives the same digits. When it is finished it is one file below
``out/cache``: the held-out losses, what the monitor wrote, and the model at every step that is wanted. A damaged file is set
aside, and the run made anew.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from figures._kit import differentiable, plain, short_digest
from figures._store import NOTHING, keep, put, read, recall
from hessiankit.blocks import Transformer, initialise
from hessiankit.cli.text import VOCAB_SIZE
from hessiankit.support.environment import code_version
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.training.monitoring import Monitor, MonitorLog
from papers.experiments.training import updates
from papers.experiments.tuning.experiment import (
    CLIP,
    Ratios,
    adamw,
    cross_entropy,
    digest_of,
    evaluated_at,
    has_diverged,
    held_out_loss,
    one_thread,
    texts,
)  # fmt: skip

CODE = (
    "hessiankit/blocks", "hessiankit/training", "hessiankit/cli/text.py", "papers/experiments/training.py",
    "papers/experiments/tuning/experiment.py", "figures/_runs.py",
)  # fmt: skip
"""What the digits of a run depend on."""
MONITORED = "monitor.jsonl"


@dataclass(frozen=True)
class ByteSpec:
    """Everything that the digits of a run depend on. The defaults are GPT-2's block without biases.

    Attributes:
        name: Part of the folder's name.
        layers: Blocks of the model.
        d_model: Width of a token.
        heads: Attention heads.
        d_ff: Width of the feed-forward network; ``4 * d_model`` by default.
        length: Bytes of a sequence.
        placement: Where the norms stand, a name in ``hessiankit.blocks.PLACEMENTS``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        activation: As ``hessiankit.TransformerBlock`` knows it.
        rotary: Rotary positions; learned ones by default.
        tied: Whether the head is the embedding.
        block: Further options of the block, sorted pairs, e.g. ``(("n_kv_heads", 1),)``.
        initialisation: A name in ``hessiankit.blocks.SCHEMES``.
        std: Of the initial matrices, where the scheme takes one; None for the scheme's own.
        embedding_std: Of the embedding; None for the scheme's own.
        steps: Updates.
        batch_size: Sequences an update.
        lr: Largest learning rate, that of block types without a ratio.
        ratios: Factors by block type (``papers.experiments.tuning.experiment.ratios_of``).
        warm_up: Fraction of the steps over which the learning rate rises.
        floor: Last learning rate over the largest.
        seed: Of the initial parameters and of the batches.
        text: Source of ``hessiankit.cli.text.load_text``.
        evaluations: How often the held-out loss is measured, the last time after the last step.
        windows: Held-out sequences that it is measured on.
        every: Steps from one measurement of the monitor to the next; 0 for no monitor.
        log_spaced: Measure at steps 1, 2, 5, 10, ... below ``every`` too.
        measured: What the monitor measures, some of ``sharpness``, ``norms``, ``eigenvalue``,
            ``hessiankit.training.depth.QUANTITIES``.
        draws: Label draws of the sharpness.
        batches: Batches of ``batch_size`` held-out sequences that the monitor measures on.
        kept: Steps at which the model is kept, besides the last.
    """

    name: str
    layers: int = 3
    d_model: int = 64
    heads: int = 4
    d_ff: int | None = None
    length: int = 64
    placement: str = "pre"
    norm: str = "layernorm"
    activation: str = "gelu"
    rotary: bool = False
    tied: bool = True
    block: tuple[tuple[str, Any], ...] = ()
    initialisation: str = "megatron"
    std: float | None = 0.02
    embedding_std: float | None = None
    steps: int = 400
    batch_size: int = 16
    lr: float = 4e-3
    ratios: Ratios = ()
    warm_up: float = 0.1
    floor: float = 0.05
    seed: int = 0
    text: str = "stdlib"
    evaluations: int = 20
    windows: int = 256
    every: int = 100
    log_spaced: bool = True
    measured: tuple[str, ...] = ("sharpness", "norms")
    draws: int = 4
    batches: int = 1
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class ByteRun:
    """A finished run.

    Attributes:
        spec: Its description.
        folder: Where it is kept, with the monitor's file.
        models: State of the model after each step that was kept; where a run broke off, as it was there.
        steps: Steps of the evaluations, 0 first.
        losses: Held-out nats a byte there; infinite from where the training loss was no number.
        train_losses: Nats a byte of each step's batch, before its update.
        log: What the monitor measured; None without one.
        seconds: Time taken, measurements included.
    """

    spec: ByteSpec
    folder: Path
    models: Mapping[int, Mapping[str, Tensor]]
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    train_losses: tuple[float, ...]
    log: MonitorLog | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether it ends half a nat above its own best, above log 256, or with no number, as in ``python -m papers tune-lr``."""
        return has_diverged(self.losses)

    def model(self, step: int | None = None) -> Transformer:
        """Return the model after a step that was kept, the last one by default."""
        model = model_of(self.spec)
        model.load_state_dict(self.models[self.spec.steps if step is None else step])
        return model


def byte_run(spec: ByteSpec, out: Path, *, tell: Tell | None = None) -> ByteRun:
    """Train, or return what was trained before.

    Args:
        spec: The run.
        out: The figures' folder.
        tell: Where progress goes; a bar of its own by default.

    Raises:
        InputError: The text or the folder cannot be used, or an option of the model does not fit.
    """
    if tell is None:
        with progress_bar() as bar:
            return byte_run(spec, out, tell=bar)
    made_by = f"{code_version(*CODE)}, {torch.get_default_dtype()}"
    identity = {"spec": plain(spec), "text": digest_of(spec.text), "made by": made_by}
    folder = out / "cache" / f"run-{spec.name}-{short_digest(identity)}"
    found = recall(folder / "run.pt", identity)
    if found is NOTHING:
        with differentiable(), one_thread():
            found = _train(spec, folder, tell)
        keep(folder / "run.pt", identity, found)
    elif spec.every:
        put(folder / MONITORED, found["monitored"].encode())
    return ByteRun(
        spec, folder, found["kept"], evaluated_at(spec.steps, spec.evaluations), tuple(found["losses"]),
        tuple(found["train_losses"]), MonitorLog.read(folder / MONITORED) if spec.every else None, found["seconds"],
    )  # fmt: skip


def model_of(spec: ByteSpec) -> Transformer:
    """Return the untrained model."""
    model = Transformer(
        VOCAB_SIZE, spec.d_model, spec.d_ff or 4 * spec.d_model, spec.layers, spec.heads, spec.placement, norm=spec.norm,
        activation=spec.activation, rotary=spec.rotary, max_len=None if spec.rotary else spec.length, tied=spec.tied, causal=True,
        initialisation=None, **dict(spec.block),
    )  # fmt: skip
    initialise(model, spec.initialisation, seed=spec.seed, std=spec.std, embedding_std=spec.embedding_std)
    return model


def measured_on(spec: ByteSpec) -> list[tuple[Tensor, Tensor]]:
    """Return the monitor's batches: windows of the held-out text, other ones for each batch, evenly spread."""
    inputs, targets = texts(spec.text)[1].windows(spec.length, spec.batches * spec.batch_size)
    rows = [slice(k, None, spec.batches) for k in range(spec.batches)]
    return [(inputs[r], targets[r]) for r in rows]


def _train(spec: ByteSpec, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train to the end, and return what the run showed."""
    text, held_out = texts(spec.text)
    windows = held_out.windows(spec.length, spec.windows)
    ends = evaluated_at(spec.steps, spec.evaluations)
    model = model_of(spec)
    optimizer, schedule = adamw(model, spec.lr, spec.ratios, spec.steps, round(spec.warm_up * spec.steps), spec.floor)
    drawn = torch.Generator().manual_seed(spec.seed)
    losses: list[float] = []
    train_losses: list[float] = []
    kept: dict[int, Any] = {}
    if spec.every:
        put(folder / MONITORED, b"")
    monitor = _monitor(spec, model, folder)
    began = time.perf_counter()

    def look(step: int) -> None:
        if monitor is not None:
            _measure(monitor, step, force=step == spec.steps)
        if step in ends:
            losses.append(held_out_loss(model, windows))
        if step in (*spec.kept, spec.steps):
            kept[step] = copy.deepcopy(model.state_dict())

    look(0)
    batch = partial(text.batch, spec.batch_size, spec.length, drawn)
    tell(f"training {spec.name}", 0, spec.steps)
    left = range(1, spec.steps + 1)
    for step, loss in updates(model, optimizer, batch, cross_entropy, left, clip=CLIP, schedule=schedule):
        if not math.isfinite(loss):
            train_losses.append(math.inf)
            break
        train_losses.append(loss)
        look(step)
        if step < spec.steps:
            tell(f"training {spec.name}", step, spec.steps)
    for step in {*spec.kept, spec.steps} - kept.keys():  # the run broke off before
        kept[step] = model.state_dict()
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return {
        "losses": losses + [math.inf] * (len(ends) - len(losses)), "train_losses": train_losses, "kept": kept,
        "monitored": "" if monitor is None else (read(monitor.path) or b"").decode(),
        "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


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
            f"figures: cannot write {monitor.path}: it lacks step {step}; make room, or pass another folder with --out"
        )


def _monitor(spec: ByteSpec, model: nn.Module, folder: Path) -> Monitor | None:
    if not spec.every:
        return None
    what: dict[str, dict[str, Any]] = {name: {} for name in ("norms", "sharpness", "eigenvalue") if name in spec.measured}
    if "sharpness" in what:
        what["sharpness"]["draws"] = spec.draws
    if depth := tuple(name for name in spec.measured if name not in what):
        what["depth"] = {"what": depth}
    return Monitor(
        model, measured_on(spec), folder / MONITORED, every=spec.every, log_spaced=spec.log_spaced, what=what, seed=spec.seed,
        on_error="record",
    )  # fmt: skip
