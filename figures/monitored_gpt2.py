"""A GPT-2 of Hugging Face's, trained with a monitor on: spectrum, approximations, sharpness and depth of one run.

``transformers.GPT2LMHeadModel`` from a config (2 layers, 2 heads, width 32, bytes, 32 positions), float32, AdamW 3e-3, 1200 steps
of 64 sequences of 32 bytes of Python's standard library. The monitor measures four sequences of the held-out files: the loss, the
sharpness of the block types, the two largest and smallest eigenvalues of the Hessian, and how far the step of the diagonal and of
KFAC is from the natural step; every 200 steps, and at 1, 2, 5, 10, 20, 50 and 100. The same run without a monitor has the same
parameters at its end, bit for bit.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

import hessiankit as hk
from figures._kit import INK, MACHINE, TYPE_COLOURS, name_ends, write_json
from hessiankit.cli.text import load_text
from hessiankit.curvature.plot_frame import panels
from hessiankit.support.environment import environment
from hessiankit.support.torch_state import preserved_random_states
from hessiankit.training.monitoring import Monitor, MonitorLog
from hessiankit.training.monitoring.log import BLUE, LINE, VERMILION, over_steps, panels_of

NAME = Path(__file__).stem
APPROXIMATIONS = ("diagonal", "kfac")


@dataclass(frozen=True)
class Settings:
    """Sizes and steps."""

    steps: int = 1200
    width: int = 32
    tokens: int = 32
    sequences: int = 64
    every: int = 200
    learning_rate: float = 3e-3


FULL = Settings()
QUICK = Settings(4, 8, 8, 4, 4)


def model_of(settings: Settings) -> nn.Module:
    """Return the language model from its config, seed 0, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=settings.tokens, n_embd=settings.width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


def eigenvalues(model: nn.Module, batches: list[Any], step: int) -> dict[str, Any]:
    """Return the two largest and the two smallest eigenvalues of the loss's Hessian, and whether they have converged."""
    ends = hk.spectrum(model, batches, loss="cross_entropy", k=2, bottom=2)
    return {"eigenvalues": ends.eigenvalues.tolist(), "residuals": ends.residuals.tolist(), "converged": ends.converged}


def cosines(model: nn.Module, batches: list[Any], step: int) -> dict[str, float]:
    """Return the cosine of each approximation's step with the natural step of the exact Gauss-Newton matrix."""
    exact: dict[str, Any] = {"loss": "cross_entropy", "against": "ggn"}
    report = hk.approximations(model, batches, **exact, of=APPROXIMATIONS, products=20).to_dict()["approximations"]
    return {name: one["step_cosine"] for name, one in report.items()}


def eigenvalue_panel(axes: Axes, log: MonitorLog) -> None:
    """Draw the largest and the smallest eigenvalues; hollow where their residuals have not converged."""
    over_steps(axes, log, "eigenvalues of the Hessian")
    values = log.series("spectrum", "eigenvalues")
    converged = np.array([bool(x) for x in log.entries("spectrum", "converged")])
    for of_one in values.T:
        colour = VERMILION if np.nanmin(of_one) < 0 else BLUE
        axes.plot(log.steps, of_one, color=colour, linewidth=0.8)
        for there, face in ((converged, colour), (~converged, "white")):
            axes.plot(log.steps[there], of_one[there], "o", color=colour, markerfacecolor=face, markersize=2.5)
    axes.axhline(0.0, color=INK, linewidth=0.6)
    axes.set_yscale("symlog", linthresh=max(1e-3 * float(np.nanmax(np.abs(values))), 1e-12))


def cosine_panel(axes: Axes, log: MonitorLog) -> None:
    """Draw the cosine of each approximation's step with the natural step."""
    over_steps(axes, log, "cosine with the natural step")
    ends = {}
    names = next(list(x) for x in log.entries("approximations") if x)
    for name, colour in zip(names, TYPE_COLOURS.values(), strict=False):
        value = log.series("approximations", name)
        there = np.isfinite(value)
        axes.plot(log.steps[there], value[there], color=colour, zorder=3, **LINE)
        if there.any():
            ends[name] = (float(value[there][-1]), colour)
    name_ends(axes, ends)


def draw_log(log: MonitorLog, path: Path, title: str) -> None:
    """Draw what every monitor measures, and the two measurements of this run after the loss."""
    drawn = panels_of(log)
    drawn[3:3] = [eigenvalue_panel, cosine_panel]
    with panels(NAME, len(drawn), title, path) as (_, every):
        for axes, panel in zip(every, drawn, strict=True):
            panel(axes, log)


def trained(settings: Settings, path: Path | None) -> tuple[Tensor, float]:
    """Train, with a monitor that writes to ``path`` if there is one; return all parameters and the seconds taken."""
    text, held_out = load_text("stdlib"), load_text("stdlib", split="validation")
    model = model_of(settings)
    data = held_out.batch(4, settings.tokens, torch.Generator().manual_seed(1))
    monitor = None
    if path is not None:
        path.unlink(missing_ok=True)
        monitor = Monitor(
            model, data, path, every=settings.every, log_spaced=True, what=("norms", "sharpness", "depth"),
            own={"spectrum": eigenvalues, "approximations": cosines},
        )  # fmt: skip
    optimizer, order = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate), torch.Generator().manual_seed(0)
    start = time.perf_counter()
    with preserved_random_states(model):
        if monitor is not None:
            monitor.step(0)
        for step in range(1, settings.steps + 1):
            inputs, labels = text.batch(settings.sequences, settings.tokens, order)
            F.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(step, learning_rate=settings.learning_rate)
    seconds = time.perf_counter() - start
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), seconds


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train twice, with and without the monitor, compare the parameters, write the monitor's file and draw it.

    ``quick`` takes four steps of a narrower model.
    """
    settings = QUICK if quick else FULL
    path = out / f"{NAME}.jsonl"
    plain, alone = trained(settings, None)
    watched, seconds = trained(settings, path)
    log = Monitor.read(path)
    last = log.records[-1]
    measuring = sum(sum(record["seconds"].values()) for record in log.records)
    about: dict[str, Any] = {
        "environment": environment(*MACHINE), "settings": asdict(settings), "parameters": plain.numel(),
        "same_parameters": bool(torch.equal(plain, watched)), "seconds_without_monitor": alone, "seconds_with_monitor": seconds,
        "seconds_measuring": measuring, "steps_measured": log.steps.tolist(), "loss": [log.records[0]["loss"], last["loss"]],
    }  # fmt: skip
    print(f"  {plain.numel():,} parameters; loss {about['loss'][0]:.3f} -> {about['loss'][1]:.3f}, in nats")
    print(f"  parameters at the end as without a monitor: {'equal' if about['same_parameters'] else 'NOT EQUAL'}")
    print(f"  {measuring:.1f} s of {seconds:.1f} s were measurements ({measuring / seconds:.0%}), at {len(log)} steps")
    print(f"  seconds of the last measurement: {', '.join(f'{k} {v:.1f}' for k, v in last['seconds'].items())}")
    picture = out / f"{NAME}{suffix}"
    draw_log(log, picture, f"GPT-2 from a config, {plain.numel():,} parameters, {settings.steps} steps")
    return [picture, path, write_json(out / f"{NAME}.json", about)]
