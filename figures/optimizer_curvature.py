"""What warns before AdamW diverges: curvature in the optimizer's metric and along its next step, in 20 runs and 20 stable ones.

A pre-norm GPT on bytes of Python's standard library, AdamW of torch's defaults, batches of 16 sequences. In the runs that are
made to diverge the rate grows by a factor a step from step 60 on, or once by a factor 100; three seeds of weights and data order.
A run ends at the spike: a training loss that is 1 nat above the mean of the ten before. The stable runs keep their rate. A
monitor measures 4 held-out sequences every 4 steps from step 40 on:

- the top eigenvalue in the optimizer's metric over the threshold 38 / lr (Cohen et al. 2022),
- the slope of the quadratic model at the end of the next step: -<d, H d> / (2 <g, d>), above 1 where it predicts a rise,
- the inverse of the largest multiple of the next step that does not raise the loss (Kalra et al. 2026), above 1 where it rises,
- for comparison, the top eigenvalue of the Hessian over gradient descent's 2 / lr.

Each warns at its first value above 1. Top: one run to its spike, and one at a constant rate. Below: by how many steps the
warnings come before the spike, and the first measure by block type along the stable run, a type moved alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import hessiankit as hk
from figures._kit import (
    FAINT,
    INK,
    MACHINE,
    METHOD_COLOURS,
    METHOD_MARKS,
    TYPE_COLOURS,
    TYPE_MARKS,
    cached,
    differentiable,
    heading,
    page,
    save,
    style,
    write_json,
    write_rows,
)
from hessiankit.cli.text import load_text
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar
from hessiankit.support.tables import as_text, table

NAME = Path(__file__).stem
MEASURES = {
    "preconditioned": r"$\lambda_{\max}(P^{-1/2} H P^{-1/2})$ / threshold",
    "quadratic": "quadratic model along the step",
    "critical": "1 / multiple of the step",
    "hessian": r"$\lambda_{\max}(H)\,$lr / 2",
}
SECTIONS = {"preconditioned": "preconditioned", "quadratic": "critical", "critical": "critical", "hessian": "eigenvalue"}
"""Measure -> the section of the monitor that it is of."""
CODE = ("hessiankit/landscape", "hessiankit/training/monitoring/measurements.py", "hessiankit/support/lanczos.py")


@dataclass(frozen=True)
class Run:
    """One run: its seed, its first rate and the factor by which the rate grows; a factor of 100 once, 1 never."""

    seed: int
    lr: float
    factor: float


@dataclass(frozen=True)
class Settings:
    """Sizes, steps and runs."""

    width: int = 32
    layers: int = 2
    tokens: int = 32
    sequences: int = 16
    raised: int = 60
    first: int = 40
    every: int = 4
    most: int = 260
    stable_steps: int = 140
    rise: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)
    factors: tuple[float, ...] = (1.04, 1.05, 1.06, 1.08, 1.1, 1.15, 100.0)
    rates: tuple[float, ...] = (1e-3, 2e-3, 3e-3, 5e-3, 8e-3, 1.2e-2, 2e-2)
    count: int = 20

    def runs(self, *, stable: bool) -> list[Run]:
        """Return the runs of either kind."""
        pairs: list[Run] = []
        for seed in self.seeds:
            pairs += [Run(seed, rate, 1.0) for rate in self.rates] if stable else [Run(seed, 3e-3, f) for f in self.factors]
        return pairs[: self.count]


QUICK = Settings(8, 1, 8, 4, 12, 4, 4, 30, 12, 0.01, (0,), (300.0,), (3e-3,), 1)


def steps_of(run: Run, settings: Settings, monitor: bool = True) -> Iterator[tuple[int, float, Any, Any, dict[str, Any] | None]]:
    """Train, and yield step, training loss, model, optimizer, and what the monitor measured there."""
    text, held_out = load_text("stdlib"), load_text("stdlib", split="validation")
    data = held_out.batch(4, settings.tokens, torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder, differentiable():
        torch.manual_seed(run.seed)
        width = settings.width
        model = hk.Transformer(256, width, 3 * width, settings.layers, n_heads=4, placement="pre", activation="gelu")
        optimizer, order = torch.optim.AdamW(model.parameters(), lr=run.lr), torch.Generator().manual_seed(run.seed)
        search = {"route": "autograd", "tol": 1e-2}
        watch = hk.Monitor(
            model, data, Path(folder) / "run.jsonl", every=settings.every, optimizer=optimizer, on_error="record",
            what={"eigenvalue": search, "preconditioned": search, "critical": {}},
        )  # fmt: skip
        for step in range(1, (settings.stable_steps if run.factor == 1 else settings.most) + 1):
            inputs, labels = text.batch(settings.sequences, settings.tokens, order)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= settings.raised:
                grown = run.factor if run.factor >= 100 else run.factor ** (step - settings.raised)
                optimizer.param_groups[0]["lr"] = run.lr * grown
            record = watch.step(step) if monitor and step >= settings.first else None
            yield step, float(loss.detach()), model, optimizer, record


def measured(run: Run, settings: Settings) -> dict[str, Any]:
    """Return a run's training losses up to the spike, the step of the spike or None, and the measures."""
    losses: list[float] = []
    rows: list[dict[str, Any]] = []
    for step, loss, _, optimizer, record in steps_of(run, settings):
        before = losses[-10:]
        losses.append(loss)
        if len(before) == 10 and not loss <= np.mean(before) + settings.rise:
            return {"losses": losses, "spike": step, "rows": rows}
        if record is not None:
            rows.append({"step": step, "lr": optimizer.param_groups[0]["lr"], **numbers(record)})
    return {"losses": losses, "spike": None, "rows": rows}


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return the four measures of a record, what they took, and the held-out loss; NaN where one failed."""
    metric, step, plain = (record.get(name, {}) for name in ("preconditioned", "critical", "eigenvalue"))
    nan = math.nan
    lr, slope = step.get("lr", nan), step.get("slope", nan)
    bend = step.get("curvature", nan) * step.get("length", nan) ** 2
    multiple = step.get("multiple", nan)
    return {
        "loss": record.get("loss", nan),
        "preconditioned": metric.get("ratio", nan),
        "quadratic": -bend / (2 * slope) if slope < 0 else math.inf if slope >= 0 else nan,
        "critical": 1 / multiple if multiple else math.inf,
        "hessian": plain.get("value", nan) * lr / 2,
        "products": metric.get("products", nan),
        "passes": step.get("passes", nan),
        "seconds_preconditioned": record["seconds"].get("preconditioned", nan),
        "seconds_critical": record["seconds"].get("critical", nan),
        "failed": ", ".join(record.get("errors", {})),
    }


def warning(run: dict[str, Any], name: str) -> int | None:
    """Return the first step at which a measure is above 1; None where it never is. Not finite in the file: above."""
    there = [row for row in run["rows"] if SECTIONS[name] not in row["failed"].split(", ")]
    return next((row["step"] for row in there if above(row[name])), None)


def above(value: float | None) -> bool:
    """Tell whether a measure warns; infinity is None in a kept answer."""
    return value is None or value > 1


def by_type(settings: Settings) -> dict[str, Any]:
    """Return the top eigenvalue by type over the threshold along the stable run at 3e-3, and the steps."""
    found: dict[str, list[float]] = {}
    steps: list[int] = []
    held_out = load_text("stdlib", split="validation")
    x, y = held_out.batch(4, settings.tokens, torch.Generator().manual_seed(1))
    at = settings.stable_steps // 4
    for step, _, model, optimizer, _ in steps_of(Run(settings.seeds[0], 3e-3, 1.0), settings, monitor=False):
        if step % at and step != 1:
            continue
        spectrum = hk.spectrum(
            model, x, y, loss="cross_entropy", k=1, preconditioner=optimizer, by="type", method="lanczos", tol=1e-3,
        )  # fmt: skip
        steps.append(step)
        for name, one in {"whole": spectrum, **spectrum.groups}.items():
            found.setdefault(name, []).append(one.threshold_ratio)
    return {"steps": steps, "ratios": found}


def draw_run(figure: Figure, left: float, run: dict[str, Any], title: str) -> None:
    """Draw the training loss of one run and below it its measures in log scale, with the marks that ``draw_leads`` names."""
    above, axes = figure.add_axes((left, 0.845, 0.40, 0.105)), figure.add_axes((left, 0.60, 0.40, 0.215))
    heading(above, title, "", "loss, nats")
    above.plot(range(1, len(run["losses"]) + 1), run["losses"], color=INK, linewidth=0.8)
    above.tick_params(labelbottom=False)
    heading(axes, "", "step", "measure / its threshold")
    steps = [row["step"] for row in run["rows"]]
    for name, colour, mark in zip(MEASURES, METHOD_COLOURS, METHOD_MARKS, strict=False):
        values = [math.nan if row[name] is None or row[name] <= 0 else row[name] for row in run["rows"]]
        axes.plot(steps, values, color=colour, marker=mark, markersize=2.2, linewidth=0.9)
    axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    for each in (above, axes):
        each.set_xlim(0, len(run["losses"]) + 1)


def draw_leads(axes: Axes, runs: list[dict[str, Any]], stable: list[dict[str, Any]]) -> None:
    """Draw by how many steps each warning comes before the spike, a dot a run, with runs without a warning and false alarms."""
    heading(axes, "steps from warning to spike", "steps; a mark per run")
    spiked = [run for run in runs if run["spike"] is not None]
    for k, (name, colour, mark) in enumerate(zip(MEASURES, METHOD_COLOURS, METHOD_MARKS, strict=False)):
        leads = [run["spike"] - at for run in spiked if (at := warning(run, name)) is not None]
        axes.plot(leads, k + np.linspace(-0.25, 0.25, max(len(leads), 1))[: len(leads)], mark, color=colour, markersize=2.8)
        false = sum(warning(run, name) is not None for run in stable)
        text = f"{MEASURES[name]}\n{len(leads)} of {len(spiked)} warned, {false} of {len(stable)} false"
        axes.text(1.03, k, text, fontsize=6, transform=axes.get_yaxis_transform(), va="center", ha="left", color=colour)
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(MEASURES) - 0.5)
    axes.axvline(0.0, color=FAINT, linewidth=0.8)


def draw_types(axes: Axes, found: dict[str, Any]) -> None:
    """Draw the top eigenvalue in the metric by type over the threshold along a stable run."""
    heading(axes, "one type moved alone, stable run", "step", r"$\lambda_{\max}$ / threshold")
    for name, values in found["ratios"].items():
        colour, mark = TYPE_COLOURS.get(name, INK), TYPE_MARKS.get(name, "")
        axes.plot(found["steps"], values, color=colour, marker=mark, label=name, linestyle="-" if mark else "--")
    axes.set_yscale("log")
    axes.legend(fontsize=6, ncols=2)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train the runs, print how early each measure warns and how often falsely, and write picture, measures and summary."""
    settings = QUICK if quick else Settings()
    results: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    total = sum(len(settings.runs(stable=stable)) for stable in results)
    with progress_bar() as tell:
        for stable, done in results.items():
            for run in settings.runs(stable=stable):
                key = {"run": asdict(run), "settings": asdict(settings)}
                done.append(cached(out, NAME, key, lambda run=run: measured(run, settings), code=CODE))  # type: ignore[misc]
                tell("runs", sum(map(len, results.values())), total)
    runs, stable_runs = results[False], results[True]
    types = cached(out, f"{NAME}-types", asdict(settings), lambda: by_type(settings), code=CODE)
    summary = summarised(runs, stable_runs)
    rows = [(name, *(f"{value:.3g}" for value in one.values())) for name, one in summary["measures"].items()]
    print(as_text(table(("measure", *next(iter(summary["measures"].values()))), rows, title=summary["title"])))
    shown = next((k for k, run in enumerate(settings.runs(stable=False)) if run.factor == 1.05), 0)
    calm = next((k for k, run in enumerate(settings.runs(stable=True)) if run.lr == 3e-3), 0)
    with style():
        figure = page(7.6, 5.2)
        draw_run(figure, 0.075, runs[shown], "rate raised by 5 % a step from step 60")
        draw_run(figure, 0.575, stable_runs[calm], "rate 0.003 throughout")
        draw_leads(figure.add_axes((0.075, 0.085, 0.24, 0.38)), runs, stable_runs)
        draw_types(figure.add_axes((0.61, 0.085, 0.365, 0.38)), types)
        picture = save(figure, out / f"{NAME}{suffix}")
    values = [
        {"kind": kind, **asdict(run), "spike": done["spike"], **row}
        for kind, stable in (("raised", False), ("stable", True))
        for run, done in zip(settings.runs(stable=stable), results[stable], strict=True)
        for row in done["rows"]
    ]
    about = {"environment": environment(*MACHINE), "settings": asdict(settings), **summary, "types": types}
    return [picture, write_rows(out / f"{NAME}.csv", values), write_json(out / f"{NAME}.json", about)]


def summarised(runs: list[dict[str, Any]], stable: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by measure: warnings before a spike, quartiles of the steps between, and false alarms; and what they took."""
    spiked = [run for run in runs if run["spike"] is not None]
    calm = [run for run in stable if run["spike"] is None]
    every = [row for run in (*runs, *stable) for row in run["rows"]]
    found: dict[str, dict[str, float]] = {}
    for name in MEASURES:
        leads = [run["spike"] - at for run in spiked if (at := warning(run, name)) is not None]
        low, middle, high = np.percentile(leads, [25, 50, 75]) if leads else (math.nan,) * 3
        found[name] = {
            "warned": len(leads), "of": len(spiked), "25 %": float(low), "median": float(middle), "75 %": float(high),
            "false alarms": sum(warning(run, name) is not None for run in calm), "of stable": len(calm),
        }  # fmt: skip
    took = {key: float(np.nanmean([math.nan if row[key] is None else row[key] for row in every]))
            for key in ("products", "passes", "seconds_preconditioned", "seconds_critical")}  # fmt: skip
    title = f"{len(spiked)} of {len(runs)} runs spiked, and {len(stable) - len(calm)} of {len(stable)} stable ones"
    return {"title": title, "measures": found, "a_measurement": took}
