"""Small language models of the standard library's words, trained by AdamW, at four stages of training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hessiankit.blocks import Transformer
from hessiankit.blocks.initialisation import initialise
from hessiankit.cli.text import load_text
from hessiankit.support.errors import InputError

BYTES = 2**21  # of the text that is divided into words: ten times what the longest run reads
HEADS, BATCH, LR = 4, 16, 1e-2
STD = 0.02 * 768**0.5
"""Standard deviation of the initial matrices times the root of the width: GPT-2's at its own width of 768."""
FRACTIONS = (0.0, 0.01, 0.1, 1.0)
"""Stages of training, as fractions of the steps."""
STAGES = ("initial", "1 %", "10 %", "trained")


@dataclass(frozen=True)
class Case:
    """One training run whose curvature is measured at every stage: GPT-2's block without biases.

    Attributes:
        vocabulary: Tokens: the most frequent words, runs of spaces and runs of signs, and one for all others.
        tied: Whether the head is the embedding.
        layers: Blocks.
        d_model: Width of a token; the feed-forward network is four times as wide.
        seed: Seed of the initial parameters and of the batches.
        steps: Updates.
        sequences: Sequences of the batch on which curvature is measured.
        length: Tokens of a sequence.
    """

    vocabulary: int
    tied: bool = True
    layers: int = 2
    d_model: int = 8
    seed: int = 0
    steps: int = 200
    sequences: int = 8
    length: int = 16

    @property
    def stages(self) -> tuple[int, ...]:
        """Steps of the stages."""
        return tuple(round(fraction * self.steps) for fraction in FRACTIONS)


@lru_cache(maxsize=8)
def tokens(vocabulary: int, split: str = "train") -> Tensor:
    """Return the text as numbers of words, (N,), the most frequent word first; the last number is that of all others.

    >>> found = tokens(16)
    >>> int(found.min()), int(found.max())
    (0, 15)
    """
    words, held_out = (_words(name) for name in ("train", "validation"))
    known = {word: n for n, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return torch.tensor([known.get(word, vocabulary - 1) for word in (words if split == "train" else held_out)])


@lru_cache(maxsize=2)
def _words(split: str) -> list[str]:
    text = load_text("stdlib", split=split).tokens[:BYTES].numpy().tobytes().decode("latin-1")
    return re.findall(r"\w+|\s+|[^\w\s]+", text)


def batch(case: Case, sequences: int, generator: torch.Generator, split: str = "train") -> tuple[Tensor, Tensor]:
    """Return random windows of the text as inputs and next tokens, both (sequences, length)."""
    text = tokens(case.vocabulary, split)
    starts = torch.randint(len(text) - case.length, (sequences,), generator=generator)
    rows = text[starts[:, None] + torch.arange(case.length + 1)]
    return rows[:, :-1], rows[:, 1:]


def probe(case: Case) -> tuple[Tensor, Tensor]:
    """Return the batch on which curvature is measured, of the training text, the same at all stages."""
    return batch(case, case.sequences, torch.Generator().manual_seed(10_000 + case.seed))


def model_of(case: Case) -> Transformer:
    """Return the untrained model, in float64."""
    model = Transformer(
        case.vocabulary, case.d_model, 4 * case.d_model, case.layers, HEADS, "pre", activation="gelu", causal=True,
        max_len=case.length, tied=case.tied, initialisation=None,
    )  # fmt: skip
    initialise(model, "megatron", std=STD / case.d_model**0.5, seed=case.seed)
    return model.double()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (B, L, V) and next tokens (B, L)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(case: Case) -> Iterator[tuple[str, Transformer, torch.optim.AdamW]]:
    """Train, and yield stage, model and optimizer at each stage.

    Raises:
        InputError: The loss is not finite.
    """
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(case.seed)
    names = dict(zip(case.stages, STAGES, strict=True))
    for step in range(case.steps + 1):
        if step in names:
            optimizer.zero_grad()
            yield names[step], model, optimizer
        if step < case.steps:
            x, y = batch(case, BATCH, generator)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            if not bool(loss.isfinite()):
                raise InputError(f"block-diagonal: the loss of {case} is {float(loss.detach())} at step {step}; lower LR")
            loss.backward()
            optimizer.step()
