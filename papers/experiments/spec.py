"""The description of a training run, from three thousand parameters to seven billion, and its untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from hessiankit.blocks import Transformer, VisionTransformer, initialise
from hessiankit.cli.text import VOCAB_SIZE
from papers.experiments.experts import add_experts
from papers.experiments.tuning.experiment import BETAS, CLIP, WEIGHT_DECAY, Ratios, Setting
from papers.experiments.tuning.experiment import model_of as model_of_setting


@dataclass(frozen=True)
class Spec:
    """Everything that the digits of a run depend on. The defaults are GPT-2's block without biases.

    Attributes:
        name: Part of the folder's name.
        arm: Method in the experiment, as the paper names it.
        size: Name of the model in the experiment.
        layers: Blocks of the model.
        d_model: Width of a token.
        heads: Attention heads.
        d_ff: Width of the feed-forward network; ``4 * d_model`` by default.
        length: Tokens of a sequence.
        vocabulary: Kinds of tokens, or classes of images.
        image: Height, width, channels and side of a patch; empty for text.
        placement: Norm placement, a name in ``hessiankit.blocks.PLACEMENTS``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        activation: A name that ``hessiankit.TransformerBlock`` knows.
        rotary: Whether positions are rotary; learned ones by default.
        tied: Whether the head is the embedding.
        block: Further options of the block, sorted pairs, e.g. ``(("n_kv_heads", 1),)``.
        experts: Networks of a block, and those that a token takes; empty for one network.
        initialisation: A name in ``hessiankit.blocks.SCHEMES``.
        std: Standard deviation of the initial matrices, where the scheme takes one; None for the scheme's own.
        embedding_std: Standard deviation of the embedding; None for the scheme's own.
        steps: Updates.
        batch_size: Sequences an update.
        optimizer: A name in ``papers.experiments.optimizers.OPTIMIZERS``.
        lr: Largest learning rate, that of block types without a ratio.
        ratios: Factors by block type (``papers.experiments.tuning.experiment.ratios_of``).
        weight_decay: Decay of the matrices.
        betas: Decay rates of the moments.
        clip: Bound on the norm of the gradient; 0 for none.
        schedule: ``"cosine"`` or ``"wsd"``.
        ramp: Warm-up of block types with a ratio, ``"direct"`` or ``"switch"`` (``hessiankit.training.optim``).
        warm_up: Fraction of the steps over which the learning rate rises.
        floor: Last learning rate over the largest; None for the schedule's own.
        precision: Type of the activations, ``"float32"`` or ``"bfloat16"``; parameters are in float32.
        seed: Seed of the initial parameters and of the batches.
        text: Source of ``hessiankit.cli.text.load_text``, or the data of ``papers.experiments.tokens.data_of``.
        evaluations: Number of measurements of the held-out loss, the last one after the last step.
        windows: Held-out sequences that it is measured on.
        every: Steps from one measurement of the monitor to the next; 0 for no monitor.
        log_spaced: Whether it measures at steps 1, 2, 5, 10, ... below ``every`` too.
        measured: Measurements of the monitor, some of ``sharpness``, ``norms``, ``eigenvalue``,
            ``hessiankit.training.depth.QUANTITIES``.
        draws: Label draws of the sharpness.
        batches: Batches of ``batch_size`` held-out sequences that the monitor measures on.
        kept: Steps at which the model is kept, besides the last.
    """

    name: str
    arm: str = ""
    size: str = ""
    layers: int = 3
    d_model: int = 64
    heads: int = 4
    d_ff: int | None = None
    length: int = 64
    vocabulary: int = VOCAB_SIZE
    image: tuple[int, ...] = ()
    placement: str = "pre"
    norm: str = "layernorm"
    activation: str = "gelu"
    rotary: bool = False
    tied: bool = True
    block: tuple[tuple[str, Any], ...] = ()
    experts: tuple[int, ...] = ()
    initialisation: str = "megatron"
    std: float | None = 0.02
    embedding_std: float | None = None
    steps: int = 400
    batch_size: int = 16
    optimizer: str = "adamw"
    lr: float = 4e-3
    ratios: Ratios = ()
    weight_decay: float = WEIGHT_DECAY
    betas: tuple[float, ...] = BETAS
    clip: float = CLIP
    schedule: str = "cosine"
    ramp: str = "direct"
    warm_up: float = 0.1
    floor: float | None = 0.05
    precision: str = "float32"
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

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Spec:
        """Return the description that was written as JSON.

        >>> Spec.of({"name": "a", "ratios": [["Emb", 10.0]]}).ratios
        (('Emb', 10.0),)
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: _tuples(value) for name, value in data.items() if name in known})

    @property
    def tokens(self) -> int:
        """Tokens of all updates."""
        return self.steps * self.batch_size * self.length


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def build(spec: Spec) -> nn.Module:
    """Return the model with weights of no scheme, on whatever device is the default: on ``meta`` nothing is stored."""
    d_ff, block = spec.d_ff or 4 * spec.d_model, {"norm": spec.norm, "activation": spec.activation, **dict(spec.block)}
    if spec.image:
        height, width, channels, patch = spec.image
        return VisionTransformer(
            patch * patch * channels, (height // patch) * (width // patch), spec.vocabulary, d_model=spec.d_model, d_ff=d_ff,
            n_blocks=spec.layers, n_heads=spec.heads, placement=spec.placement, **block,
        )  # fmt: skip
    return Transformer(
        spec.vocabulary, spec.d_model, d_ff, spec.layers, spec.heads, spec.placement, rotary=spec.rotary,
        max_len=None if spec.rotary else spec.length, tied=spec.tied, causal=True, initialisation=None, **block,
    )  # fmt: skip


def model_of(spec: Spec) -> Any:
    """Return the untrained model."""
    model = build(spec)
    initialise(model, spec.initialisation, seed=spec.seed, std=spec.std, embedding_std=spec.embedding_std)
    if spec.experts:
        add_experts(model, spec.experts, scheme=spec.initialisation, std=spec.std, seed=spec.seed)
    return model


def scale(seeds: int, blocks: int, width: int, parameters: int, data: str) -> str:
    """Return a scale in words.

    >>> scale(2, 1, 8, 2960, "60 digits")
    '2 seeds; 1 block of width 8, 3 thousand parameters; 60 digits'
    """
    count = f"{parameters / 1e6:.2g} million" if parameters >= 1e5 else f"{parameters / 1e3:.2g} thousand"
    models, runs = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((blocks, "block"), (seeds, "seed")))
    return f"{runs}; {models} of width {width}, {count} parameters; {data}"


def scale_of(run: Spec | Setting, seeds: int) -> str:
    """Return the size of runs in words.

    >>> scale_of(Spec("x", layers=1, d_model=8, heads=2, length=16, steps=30), 2)
    '2 seeds; 1 block of width 8, 3 thousand parameters; 30 steps of 256 bytes of the standard library'
    """
    text = "the standard library" if run.text == "stdlib" else run.text
    count, unit = run.batch_size * run.length, "bytes" if isinstance(run, Setting) or run.vocabulary == VOCAB_SIZE else "tokens"
    if isinstance(run, Spec) and run.image:
        count, unit = run.batch_size, "images"
    data = f"{run.steps} steps of {count} {unit} of {text}"
    model = model_of_setting(run, 0) if isinstance(run, Setting) else counted(run)
    return scale(seeds, run.layers, run.d_model, sum(p.numel() for p in model.parameters()), data)


def counted(spec: Spec) -> nn.Module:
    """Return the model without memory, for its parameters' shapes."""
    with torch.device("meta"):
        model = build(spec)
        return add_experts(model, spec.experts) if spec.experts else model
