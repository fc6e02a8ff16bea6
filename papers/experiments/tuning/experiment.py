"""One training run of a byte-level language model: a pure function of a frozen description."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.blocks import Transformer
from hessiankit.blocks.initialisation import initialise
from hessiankit.cli.text import VOCAB_SIZE, TextDataset, load_text
from hessiankit.support.errors import InputError
from hessiankit.training.optim import PRESETS, blockwise_lr, blockwise_schedule
from hessiankit.training.partition import model_parts
from papers.experiments.training import updates

Ratios: TypeAlias = tuple[tuple[str, float], ...]
"""(block type, factor on the learning rate), sorted; types that are not named have 1."""


def ratios_of(factors: Mapping[str, float]) -> Ratios:
    """Return factors in the one way to write them, to three digits, without those that are 1.

    >>> ratios_of({"Norm": 1.0, "QK": 8.0, "Emb": 3.14159})
    (('Emb', 3.14), ('QK', 8.0))
    """
    shortened = {kind: float(f"{factor:.3g}") for kind, factor in factors.items()}
    return tuple(sorted((kind, factor) for kind, factor in shortened.items() if factor != 1.0))


PAPER = ratios_of(PRESETS["paper"])
"""The Sharpness Disparity Principle, eq. (5): Emb 10, QK 8, FFN 6, VO 4 on the learning rate of the norms."""


def entries_by_type(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters' entries of each block type."""
    found: dict[str, int] = {}
    for part in model_parts(model):
        found[part.type] = found.get(part.type, 0) + part.size
    return found


def weighted_ratio(ratios: Ratios, entries: Mapping[str, int]) -> float:
    """Return the mean factor over all entries: the uniform factor with the same learning rate integrated over the parameters.

    >>> weighted_ratio((("Emb", 10.0),), {"Emb": 1, "Norm": 3})
    3.25
    """
    factors = dict(ratios)
    return sum(count * factors.get(kind, 1.0) for kind, count in entries.items()) / sum(entries.values())


BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
"""AdamW's, and the bound on the gradient's norm: The Sharpness Disparity Principle, App. A.2. Matrices decay, vectors do not."""
STD = 0.02
"""Of the initial matrices, GPT-2's; those that end a branch divided by sqrt(2 L)."""
SPIKE = 0.5
"""A run counts as diverged that ends this many nats above its own best evaluation, above log 256, or with no number."""


@dataclass(frozen=True)
class Setting:
    """What all the runs of a comparison share.

    Attributes:
        text: Source of :func:`hessiankit.cli.text.load_text`.
        digest: Digests of both splits, so that runs on another version of the text are other runs; see :func:`digest_of`.
        steps: Updates, the budget.
        batch_size: Sequences an update.
        length: Bytes of a sequence.
        layers: Blocks of the model.
        d_model: Width of a token; the network is four times as wide.
        heads: Attention heads.
        warm_up: Fraction of the steps over which the learning rate rises.
        floor: Last learning rate over the largest (App. A.2: 1/20).
        evaluations: How often the held-out loss is measured, the last time after the last step.
        windows: Held-out sequences that it is measured on, always the same.
    """

    text: str = "stdlib"
    digest: str = ""
    steps: int = 400
    batch_size: int = 16
    length: int = 64
    layers: int = 3
    d_model: int = 64
    heads: int = 4
    warm_up: float = 0.1
    floor: float = 0.05
    evaluations: int = 20
    windows: int = 256


QUICK = Setting(steps=60, batch_size=8, length=32, layers=2, d_model=32, heads=2, evaluations=10, windows=64)
"""A model that has hardly begun to learn: for the form of the tables."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that the digits of a run depend on.

    Attributes:
        setting: What it shares with the others.
        lr: Largest learning rate, that of block types without a ratio.
        ratios: Factors by block type, sorted.
        seed: Of the initial parameters and of the batches; arms of one seed share both.
    """

    setting: Setting
    lr: float
    ratios: Ratios = ()
    seed: int = 0


@dataclass(frozen=True)
class RunResult:
    """What a run showed.

    Attributes:
        spec: Description of the run.
        steps: Steps of the evaluations, 0 first.
        losses: Held-out nats a byte there; infinite from where the loss was no number.
        seconds: Time taken.
    """

    spec: RunSpec
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: float

    @property
    def final(self) -> float:
        """The held-out loss after the last step."""
        return self.losses[-1]

    @property
    def diverged(self) -> bool:
        """Whether the losses are those of :func:`has_diverged`."""
        return has_diverged(self.losses)


def has_diverged(losses: Sequence[float], vocabulary: int = VOCAB_SIZE) -> bool:
    """Return whether a run's losses end :data:`SPIKE` above their own best, above a uniform guess, or with no number.

    >>> has_diverged((5.5, 2.0, 2.6)), has_diverged((5.5, 2.0, 2.4)), has_diverged((5.5, math.inf))
    (True, False, True)
    """
    return not losses[-1] <= min(min(losses) + SPIKE, math.log(vocabulary))


def run(spec: RunSpec) -> RunResult:
    """Train from scratch on one thread and measure the held-out loss along the way.

    Raises:
        InputError: The text cannot be read or is shorter than the windows, or is not the one that the description names.
    """
    setting = spec.setting
    text, held_out = texts(setting.text)
    if setting.digest and setting.digest != digest_of(setting.text):
        raise InputError(f"tune-lr: the text {setting.text!r} changed since these runs were planned; start again")
    began, ends = time.perf_counter(), evaluated_at(setting.steps, setting.evaluations)
    with one_thread():
        model = model_of(setting, spec.seed)
        windows = held_out.windows(setting.length, setting.windows)
        losses = [held_out_loss(model, windows)]
        for step in training(model, text, spec):
            if step in ends:
                losses.append(held_out_loss(model, windows))
    losses += [math.inf] * (len(ends) - len(losses))
    return RunResult(
        spec, ends, tuple(x if math.isfinite(x) else math.inf for x in losses), round(time.perf_counter() - began, 3)
    )


def training(model: nn.Module, text: TextDataset, spec: RunSpec) -> Iterator[int]:
    """Train, yielding the number of each step after its update; stop where a loss is not finite."""
    setting = spec.setting
    optimizer, schedule = adamw(model, spec.lr, spec.ratios, setting.steps, warm_up_steps(setting), setting.floor)
    generator = torch.Generator().manual_seed(spec.seed)
    found = updates(
        model, optimizer, lambda: text.batch(setting.batch_size, setting.length, generator), cross_entropy,
        range(1, setting.steps + 1), clip=CLIP, schedule=schedule,
    )  # fmt: skip
    return (step for step, loss in found if math.isfinite(loss))


def adamw(
    model: nn.Module, lr: float, ratios: Ratios, steps: int, warm_up: int, floor: float
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW with a learning rate by block type, and its schedule.

    All groups warm up to their own peak and end at ``floor`` of it, so that the ratios hold from the first step to the last.
    """
    optimizer = torch.optim.AdamW(blockwise_lr(model, lr, dict(ratios), weight_decay=WEIGHT_DECAY), betas=BETAS)
    return optimizer, blockwise_schedule(optimizer, warmup=warm_up, steps=steps, final=floor)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (..., V) and next tokens or classes (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def model_of(setting: Setting, seed: int) -> Transformer:
    """Return the untrained model: GPT-2's block (Pre-Norm, LayerNorm, GELU, learned positions, tied head) without biases."""
    model = Transformer(
        VOCAB_SIZE, setting.d_model, 4 * setting.d_model, setting.layers, setting.heads, "pre", activation="gelu", causal=True,
        max_len=setting.length, initialisation=None,
    )  # fmt: skip
    initialise(model, "megatron", std=STD, seed=seed)
    return model


def warm_up_steps(setting: Setting) -> int:
    """Return the steps of the warm-up.

    >>> warm_up_steps(Setting(steps=400, warm_up=0.1))
    40
    """
    return round(setting.warm_up * setting.steps)


def evaluated_at(steps: int, evaluations: int) -> tuple[int, ...]:
    """Return the steps after which the held-out loss is measured, evenly spread, 0 and the last one among them.

    >>> evaluated_at(10, 3)
    (0, 3, 7, 10)
    """
    count = min(evaluations, steps)
    return tuple(round(k * steps / count) for k in range(count + 1))


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: tuple[Tensor, Tensor], chunk: int = 32) -> float:
    """Return the mean cross entropy (nats a byte) of fixed windows, ``chunk`` of them at a time."""
    inputs, targets = windows
    total = sum(
        F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum").double()
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True)
    )
    return float(total) / targets.numel()


@lru_cache(maxsize=2)
def texts(source: str) -> tuple[TextDataset, TextDataset]:
    """Return both splits of a text, read once a process."""
    return load_text(source), load_text(source, split="validation")


def digest_of(source: str) -> str:
    """Return the digests of the training split and of the held-out split of a text."""
    return "-".join(text.digest[:8] for text in texts(source))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that the digits do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
