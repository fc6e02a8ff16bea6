"""Scores of training samples against 200 trainings, each without one sample: ``python -m benchmarks.influence``.

A transformer on sequences of a noisy rule, and a perceptron on noisy labels. For each method the rank correlation, over the 200
samples left out, of its scores with the changes of the mean test loss; its 95 % interval by Fisher's transformation with the
variance 1.06 / (n - 3) of Fieller, Hartley and Pearson (1957); seconds of the processor, one thread.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hessiankit as hk

TRAININGS, TESTS, CLASSES = 200, 20, 4
DAMPINGS = (1e-1, 1e-2, 1e-3)
"""Numbers added to the diagonal; the largest eigenvalues of the Gauss-Newton matrices here are of the order of one."""


class Study(NamedTuple):
    """A model, its data, the optimizer and the passes of a training."""

    model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    passes: int


def perceptron(rate: float = 0.1) -> Study:
    """Return a perceptron on labels of which a tenth is drawn at random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TRAININGS + TESTS, 8, generator=generator)
    rule = torch.randn(8, CLASSES, generator=generator)
    y = (x @ rule + 0.3 * torch.randn(len(x), CLASSES, generator=generator)).argmax(1)
    wrong = torch.rand(len(y), generator=generator) < 0.1
    y[wrong] = torch.randint(CLASSES, (int(wrong.sum()),), generator=generator)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    sets = ((x[:TRAININGS], y[:TRAININGS]), (x[TRAININGS:], y[TRAININGS:]))
    return Study(model, *sets, lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, weight_decay=1e-3), 20)


def transformer() -> Study:
    """Return a language model on sequences of a noisy rule: a token follows from the two before it."""
    generator = torch.Generator().manual_seed(0)
    V, length = 12, 10
    follows = torch.randint(V, (V, V), generator=generator)
    ids = torch.randint(V, (TRAININGS + TESTS, length), generator=generator)
    for t in range(2, length):
        noise = torch.rand(len(ids), generator=generator) < 0.1
        ids[:, t] = torch.where(noise, ids[:, t], follows[ids[:, t - 2], ids[:, t - 1]])
    inputs, labels = ids[:, :-1], ids[:, 1:]

    def model() -> nn.Module:
        return hk.Transformer(V, 16, 32, 2, n_heads=2, placement="pre", activation="gelu", max_len=length, seed=1)

    sets = ((inputs[:TRAININGS], labels[:TRAININGS]), (inputs[TRAININGS:], labels[TRAININGS:]))
    return Study(model, *sets, lambda p: torch.optim.AdamW(p, lr=2e-3, eps=1e-4), 10)


STUDIES = {
    "perceptron": perceptron,
    "perceptron, a third of the rate": partial(perceptron, 0.03),
    "transformer": transformer,
}


def loss(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean loss of some samples, each times its weight."""
    z = model(x)
    terms = F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="none").reshape(len(y), -1).mean(1)
    return (terms if weights is None else terms * weights).mean()


def trained(study: Study, loader: DataLoader[Any]) -> tuple[nn.Module, hk.RecordedRun]:
    """Return the model after training, and the record of it."""
    model = study.model()
    optimizer = study.optimizer(model.parameters())
    run = hk.RecordedRun(model, optimizer)
    for _ in range(study.passes):
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
    return model, run


def trained_again(study: Study, run: hk.RecordedRun, sample: int) -> float:
    """Return the mean test loss after the same steps, in which one sample has no weight."""
    model, (x, y) = study.model(), study.data
    optimizer = study.optimizer(model.parameters())
    weights = torch.ones(len(x))
    if sample >= 0:
        weights[sample] = 0
    for step in run.steps:
        at = list(step.samples)
        optimizer.zero_grad()
        loss(model, x[at], y[at], weights[at]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(model, *study.test))


def interval(rho: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a rank correlation."""
    centre, half_width = math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12)), 1.96 * math.sqrt(1.06 / (count - 3))
    return math.tanh(centre - half_width), math.tanh(centre + half_width)


def rows(name: str, count: int) -> list[tuple[str, ...]]:
    """Return a row for each method: the study, the method, damping, rank correlation, interval, seconds."""
    study = STUDIES[name]()
    loader = DataLoader(TensorDataset(*study.data), batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, run = trained(study, loader)
    start = time.process_time()
    whole = trained_again(study, run, -1)
    changes = torch.tensor([trained_again(study, run, k) - whole for k in range(count)])
    size = sum(p.numel() for p in model.parameters())
    table = [(f"{name}, {size:,} parameters", f"{count} trainings", "", "", "", f"{time.process_time() - start:.1f}")]
    options: list[dict[str, Any]] = [{"method": run}]
    options += [{"method": m, "damping": d} for m in ("kfac", "ekfac", "ggn") for d in DAMPINGS]
    for one in options:
        start = time.process_time()
        found = hk.influence(model, study.data, study.test, loss="cross_entropy", **one)
        seconds = time.process_time() - start
        rho = float(spearmanr(changes, found.scores.mean(1)[:count]).statistic)
        low, high = interval(rho, count)
        damping = "" if found.damping is None else f"{found.damping:g}"
        table.append(("", found.method, damping, f"{rho:.3f}", f"{low:.3f} to {high:.3f}", f"{seconds:.1f}"))
        print(" | ".join(table[-1]), flush=True)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STUDIES), help=f"of: {', '.join(STUDIES)}")
    parser.add_argument("--count", type=int, default=TRAININGS, help="samples left out, one at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = [row for name in options.names for row in rows(name, options.count)]
    print("| model | method | damping | rank correlation | 95 % interval | processor seconds |")
    print("|---|---|--:|--:|---|--:|")
    for row in lines:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
