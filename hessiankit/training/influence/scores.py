"""Scores of training samples for test samples: the result of an influence computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hessiankit.curvature.plot_frame import OKABE_ITO, Picture, dress, picture
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table

ENDS = 5
"""Samples of each end of the ranking that are printed: with both ends, a screen has room for headline and notes."""


@dataclass(frozen=True, repr=False, eq=False)
class Influence(Printed, WithDict):
    """Scores of training samples; made by :func:`hessiankit.influence`.

    Attributes:
        scores: Estimated changes of the test losses if a training sample is left out, (training samples, test samples), or a
            token, (training samples, tokens, test samples), NaN beyond the end of a shorter sequence. Positive: helpful.
        method: The method, in words.
        damping: Number added to the diagonal of the matrix; None for a replay.
        parameters: P.
        notes: What has not converged.
        seconds: Time taken.
    """

    scores: Tensor
    method: str
    damping: float | None
    parameters: int
    notes: tuple[str, ...]
    seconds: float

    @property
    def by_sample(self) -> Tensor:
        """Scores of whole samples, (training samples, test samples)."""
        return self.scores if self.scores.ndim == 2 else self.scores.nansum(1)

    def ranking(self, test: int | None = None) -> Tensor:
        """Return the training samples from the most helpful to the most harmful, for one test sample or the mean over all."""
        return self._of(test).argsort(descending=True)

    def plot(self, path: Path | str | None = None, *, test: int | None = None, count: int = 10) -> Picture:
        """Draw the scores of the most helpful and the most harmful training samples as bars.

        Args:
            path: File to write, ``.png``, ``.svg`` or ``.pdf``.
            test: Number of a test sample; None: the mean over all of them.
            count: Samples of each of the two.
        """
        values, order = self._of(test), self.ranking(test).tolist()
        ends = order if len(order) <= 2 * count else order[:count] + order[-count:]
        with picture("Influence", 5.0, 0.9 + 0.18 * len(ends), path, layout="constrained") as figure:
            axes = figure.subplots()
            dress(axes)
            scores = [float(values[at]) for at in ends][::-1]
            axes.barh(range(len(ends)), scores, color=[OKABE_ITO[0] if x > 0 else OKABE_ITO[1] for x in scores])
            axes.set_yticks(range(len(ends)), [str(at) for at in ends[::-1]])
            axes.set_ylabel("training sample", fontsize=8)
            axes.set_xlabel(f"change of {_loss_of(test)} if left out", fontsize=8)
            axes.set_title(f"{self.method}: helpful above 0, harmful below", fontsize=8)
        return figure

    def _of(self, test: int | None) -> Tensor:
        scores = self.by_sample
        if test is not None and not 0 <= test < scores.shape[1]:
            raise InputError(f"Influence: test={test}; there are {scores.shape[1]} test samples, from 0")
        return scores.mean(1) if test is None else scores[:, test]

    def _headline(self) -> str:
        n, m = self.by_sample.shape
        damping = "" if self.damping is None else f", damping {self.damping:g}"
        size = f"{n:,} training and {m:,} test samples, {self.parameters:,} parameters"
        return f"influence by {self.method}{damping}: {size}, {self.seconds:.2f} s"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        values, order = self._of(None), self.ranking().tolist()
        ends = order if len(order) <= 2 * ENDS else order[:ENDS] + order[-ENDS:]
        rows = [(str(at), f"{float(values[at]):+.4g}") for at in ends]
        yield table(("training sample", f"change of {_loss_of(None)} if left out"), rows, title="most helpful first")
        yield from self.notes


def _loss_of(test: int | None) -> str:
    return "the mean test loss" if test is None else f"the loss of test sample {test}"


def joined(parts: list[Tensor]) -> Tensor:
    """Return rows (n, S), or (n, T, S) of several lengths T padded with NaN, as one tensor."""
    longest = max((x.shape[1] for x in parts if x.ndim == 3), default=0)
    return torch.cat([x if x.ndim == 2 else _padded(x, longest, torch.nan) for x in parts])


def _padded(x: Tensor, length: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[1]), value=value)
