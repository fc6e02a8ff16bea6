"""``python -m papers rare-words``: whose the squares of a Hessian in AdamW's metric are.

The second moments of a word that training has seen a few times, and not lately, are almost zero, and AdamW's metric divides by
them. The trained Hessian is measured with all entries of words that the batch reads, and without those of rarer and rarer words.
Rows of words that the batch does not read are left out; with 4,096 words they hold less than a hundredth of the squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import hessiankit as hk
from hessiankit.cli.options import Positive
from hessiankit.cli.program import command
from hessiankit.support.tables import Table, say, table
from hessiankit.support.torch_state import one_thread
from papers.block_diagonal.measures import metric_scale, partition_labels
from papers.block_diagonal.models import BATCH, STAGES, Case, batch, probe, trained
from papers.block_diagonal.study import PARTITIONS, interval
from papers.block_diagonal.words import TOGETHER, rows_of, words_of

LEAST = (1, 20, 100)
EXAMPLES = (
    ("python -m papers rare-words", "the table of docs/block_diagonal.md: 4 minutes"),
    ("python -m papers rare-words --words 256 --seeds 1", "a smaller vocabulary, one run: seconds"),
)
app = command("rare-words", EXAMPLES)


def times_seen(case: Case) -> Tensor:
    """Return how often each word is an input of training.

    >>> case = Case(16, steps=3)
    >>> int(times_seen(case).sum()) == case.steps * BATCH * case.length
    True
    """
    generator, times = torch.Generator().manual_seed(case.seed), torch.zeros(case.vocabulary, dtype=torch.long)
    for _ in range(case.steps):
        times += batch(case, BATCH, generator)[0].flatten().bincount(minlength=case.vocabulary)
    return times


def shares_without(case: Case, least: Sequence[int] = LEAST) -> list[dict[str, float]]:
    """Return, without words that were seen fewer than ``least`` times, the share of the squares that is left, and its shares.

    Keys are ``"squares"`` and the names of partitions.
    """
    model, adamw = next((model, adamw) for stage, model, adamw in trained(case) if stage == STAGES[-1])
    x, y = probe(case)
    operator, scale = hk.hessian_operator(model, x, y, loss="cross_entropy"), metric_scale(model, adamw)
    assert scale is not None
    words, read = words_of(model, x, operator.slices), torch.ones(operator.shape[0], dtype=torch.bool)
    read[torch.cat([words.at.reshape(-1), words.zero])] = False
    at, squares = read.nonzero()[:, 0], torch.empty(int(read.sum()), int(read.sum()), dtype=torch.float64)
    for rows, into in zip(at.split(TOGETHER), squares.split(TOGETHER), strict=True):
        into.copy_(rows_of(operator, rows)[:, at] * scale[at] * scale[rows].unsqueeze(1)).square_()
    seen = torch.full((operator.shape[0],), max(least))  # entries of no word are always kept
    seen[operator.slices["embedding.W_E"]] = times_seen(case).repeat_interleave(case.d_model)
    partitions = {name: numbers[at] for name, numbers in partition_labels(operator, model).items()}
    return [_shares(squares, seen[at] >= n, partitions) for n in least]


def _shares(squares: Tensor, kept: Tensor, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    some, total = squares[kept][:, kept], float(squares.sum())
    left = float(some.sum())
    masks = {name: numbers[kept].unsqueeze(1) == numbers[kept] for name, numbers in partitions.items()}
    return {"squares": left / total, **{name: float(some[mask].sum()) / left for name, mask in masks.items()}}


def summary(case: Case, seeds: Sequence[int]) -> Table:
    """Return the means over seeds with their intervals, a row for each number of times."""
    by_seed = [shares_without(replace(case, seed=seed)) for seed in seeds]
    rows = []
    for k, n in enumerate(LEAST):
        values = {name: interval([found[k][name] for found in by_seed]) for name in ("squares", *PARTITIONS)}
        rows.append((str(n), f"{100 * values['squares'].mean:.2f} %", *(str(values[name]) for name in PARTITIONS)))
    return table(("seen at least", "squares left", *PARTITIONS), rows, left=0)


@app.default
def rare_words(*, words: Positive = 4096, blocks: Positive = 1, seeds: Positive = 3) -> None:
    """Print whose the squares of a trained model's Hessian in AdamW's metric are: tied head, width 16, 1,000 steps.

    Args:
        words: Size of the vocabulary.
        blocks: Blocks of the model.
        seeds: Runs, from 0 on.
    """
    with one_thread():
        say(summary(Case(words, layers=blocks, d_model=16, steps=1000), range(seeds)))
