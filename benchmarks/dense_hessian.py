"""The dense Hessian by closed form beside its peers: same problem, same process, in turn, every entry compared.

The peers are the routes of ``hessiankit.verify.REFERENCES`` that a user would reach for. Each pushes its directions in
chunks of the size that a short trial found fastest for it. The clock of the closed form includes checking its arguments
and tracing; that of a peer starts after its arguments were checked. A peer that returns something else than the Hessian
is timed all the same, and marked.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import in_turn
from hessiankit import TransformerBlock, VisionTransformer, hessian
from hessiankit.data import load_images, patchify
from hessiankit.verify.health import Health, examine
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported
from hessiankit.verify.references.base import directions_at_once

CLOSED = "closed form"
PEERS = ("reverse-over-reverse", "jvp(grad)", "torch.func.hessian", "curvlinops")

Tell = Callable[[str, float, int], None]
"""Called with (what is going on, calls made, calls in all) of one configuration."""


class Case(NamedTuple):
    """A module with one batch."""

    module: nn.Module
    inputs: Tensor
    target: Tensor


@dataclass(frozen=True)
class Configuration:
    """One problem to measure: a name, what it is, its loss, and how to make it."""

    name: str
    summary: str
    loss: str
    make: Callable[[], Case]


@dataclass(frozen=True)
class Row:
    """One method on one configuration.

    Attributes:
        method: The closed form or the name of a peer.
        status: "right", "wrong", "unconfirmed" (no two independent routes agree) or "unsupported".
        error: Largest difference from the routes that are right, relative to the largest entry of its block pair.
        reason: The status in words.
        chunk: Directions pushed together; None for the closed form.
        first_seconds: The first call on this problem, which warms up.
        seconds: One number a round.
        ratios: ``seconds`` divided by those of the closed form in the same round: above 1 the closed form is faster.
    """

    method: str
    status: str
    error: float | None
    reason: str
    chunk: int | None
    first_seconds: float | None
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the row with its medians and ranges as plain Python data."""
        return {**vars(self), "median_seconds": _median(self.seconds), "median_ratio": _median(self.ratios)}

    def cells(self) -> tuple[str, ...]:
        """Return the row as text: method, first call, median, range, ratio, error."""
        if not self.seconds:
            return self.method, "", "", "", "", f"**{self.status}**: {self.reason}"
        first = "" if self.first_seconds is None else _short(self.first_seconds)
        ratio = "" if self.method == CLOSED else f"{statistics.median(self.ratios):.2f} ({_range(self.ratios, '.2f')})"
        error = "" if self.error is None else f"{self.error:.1e}"
        mark = "" if self.status == "right" else f" **{self.status}**"
        return self.method, first, _short(statistics.median(self.seconds)), _range(self.seconds, ".3g"), ratio, error + mark


@dataclass(frozen=True)
class Measurement:
    """What is known of one configuration after some rounds."""

    configuration: Configuration
    parameters: int
    batch: int
    dtype: str
    rounds: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data."""
        return {
            "name": self.configuration.name,
            "summary": self.configuration.summary,
            "loss": self.configuration.loss,
            "parameters": self.parameters,
            "batch": self.batch,
            "dtype": self.dtype,
            "rounds": self.rounds,
            "rows": [row.to_dict() for row in self.rows],
        }


def _digits(patch: int, batch: int, d_model: int, d_ff: int) -> Callable[[], Case]:
    def make() -> Case:
        data = load_images("digits", dtype=torch.float64).first(batch)
        patches = patchify(data.images, patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = VisionTransformer(patches.shape[2], patches.shape[1], 10, d_model=d_model, d_ff=d_ff, bias=True).double()
        return Case(model, patches, data.labels)

    return make


def _block() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens, target = (torch.randn(1, 49, 16, dtype=torch.float64) for _ in range(2))
        return Case(TransformerBlock(16, 64).double(), tokens, target)


CONFIGURATIONS = (
    Configuration("tiny", "digits classifier, 4 tokens, d_model 4, d_ff 8", "cross_entropy", _digits(4, 8, 4, 8)),
    Configuration("small", "digits classifier, 16 tokens, d_model 8, d_ff 32", "cross_entropy", _digits(2, 32, 8, 32)),
    Configuration("block", "post-norm block alone, 49 tokens, d_model 16, d_ff 64", "mse", _block),
    Configuration("digits", "digits classifier, 16 tokens, d_model 16, d_ff 64", "cross_entropy", _digits(2, 128, 16, 64)),
)


def measure(configuration: Configuration, rounds: int, tell: Tell) -> Iterator[Measurement]:
    """Measure one configuration and yield what is known after each round."""
    case = configuration.make()
    problem = Problem(case.module, case.inputs, case.target, configuration.loss)
    total = (1 + len(PEERS)) * (rounds + 1)
    made = 0

    def progress(what: str) -> Callable[[int, int], None]:
        return lambda done, of: tell(f"{configuration.name}: {what}", made + done / of, total)

    def closed(what: str) -> tuple[Tensor, float]:
        start = time.perf_counter()
        found = hessian(case.module, case.inputs, case.target, loss=configuration.loss, progress=progress(f"{CLOSED}, {what}"))
        return found.matrix, time.perf_counter() - start

    def peer(name: str, chunk: int | None, what: str) -> Outcome:
        return REFERENCES[name].measure(problem, chunk=chunk, progress=progress(f"{name}, {what}"))

    results: dict[str, Outcome | Tensor | Unsupported] = {}
    results[CLOSED], first_seconds = closed("first call")
    first: dict[str, float] = {CLOSED: first_seconds}
    chunks: dict[str, int] = {}
    for name in PEERS:
        made += 1
        try:
            outcome = peer(name, None, "first call")
        except Unsupported as reason:
            results[name] = reason
            continue
        results[name], first[name] = outcome, outcome.seconds
        progress(f"{name}, trial of chunks")(1, 1)
        chunks[name] = _fastest_chunk(name, problem)
    health = examine(results, problem)
    results.clear()  # a matrix each

    def again(name: str) -> Callable[[int], float]:
        def call(k: int) -> float:
            nonlocal made
            made += 1
            what = f"round {k + 1} of {rounds}"
            return closed(what)[1] if name == CLOSED else peer(name, chunks[name], what).seconds

        return call

    for k, seconds in enumerate(in_turn({name: again(name) for name in first}, rounds), start=1):
        rows = tuple(_row(name, health[name], chunks.get(name), first.get(name), seconds) for name in (CLOSED, *PEERS))
        dtype = str(problem.dtype).removeprefix("torch.")
        yield Measurement(configuration, problem.size, int(case.inputs.shape[0]), dtype, k, rows)


def _fastest_chunk(name: str, problem: Problem) -> int:
    """Return how many directions to push together, the fastest of four sizes on as many directions as the largest."""
    default = directions_at_once(problem)
    count = min(4 * default, problem.size)
    directions = torch.eye(problem.size, dtype=problem.dtype)[:count]
    sizes = sorted({min(max(1, size), count) for size in (default // 2, default, 2 * default, 4 * default)})
    times = {size: min(REFERENCES[name].measure(problem, directions, chunk=size).seconds for _ in range(2)) for size in sizes}
    return min(times, key=lambda size: times[size])


def _row(name: str, health: Health, chunk: int | None, first: float | None, seconds: dict[str, list[float]]) -> Row:
    error = health.deviation if math.isfinite(health.deviation) else None
    if first is None:
        status = "unsupported"
    elif health.healthy:
        status = "right"
    else:
        status = "unconfirmed" if error is None else "wrong"
    mine = tuple(seconds.get(name, ()))
    ratios = tuple(own / closed for own, closed in zip(mine, seconds[CLOSED], strict=False))
    return Row(name, status, error, health.reason, chunk, first, mine, ratios)


LEGEND = (
    "- ratio: seconds of the method over those of the closed form in the same round, median and range; above 1 the closed form\n"
    "  is faster.",
    "- error: largest difference from the routes that agree with each other, relative to the largest entry of its block pair.",
)
_HEADER = ("configuration", "P", "batch", "loss", "method", "first call (s)", "median (s)", "range (s)", "ratio (range)", "error")
_TEXT = ("configuration", "loss", "method")


def markdown(measurements: Sequence[Measurement], where: dict[str, Any]) -> str:
    """Return the measurements as a Markdown document: where they were made, one table, what the columns mean."""
    lines: list[tuple[str, ...]] = [_HEADER]
    for m in measurements:
        about = (m.configuration.name, str(m.parameters), str(m.batch), m.configuration.loss)
        lines += [(*about, *row.cells()) for row in m.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(_HEADER))]
    rows = [[c.ljust(w) if h in _TEXT else c.rjust(w) for c, w, h in zip(line, widths, _HEADER, strict=True)] for line in lines]
    rows.insert(1, ["-" * w if h in _TEXT else "-" * (w - 1) + ":" for w, h in zip(widths, _HEADER, strict=True)])
    versions = ", ".join(f"{name} {where[name]}" for name in ("hessiankit", "torch", "curvlinops", "numpy", "python"))
    parts = [
        "# Dense Hessian: the closed form beside automatic differentiation",
        "",
        f"- {where['date']}: {where['threads']} thread(s) of {where['cores']} on {where['processor']}, {where['system']}, "
        f"load average at the start {where['load_average']}",
        f"- {versions}",
        f"- every method once a round, {' or '.join(map(str, sorted({m.rounds for m in measurements})))} round(s)",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *LEGEND,
        *(f"- {m.configuration.name}: {m.configuration.summary}, {m.dtype}." for m in measurements),
        "",
    ]
    return "\n".join(parts)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
