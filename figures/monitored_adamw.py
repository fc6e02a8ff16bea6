"""A GPT of a million parameters with a monitor: AdamW's own metric and the next step, every 50 steps.

A pre-norm GPT (5 layers, width 128, 64 bytes) on Python's standard library in float32, AdamW 1e-3, 64 sequences a step. The
monitor measures 4 held-out sequences every 50 steps: the loss, the top eigenvalue in the optimizer's metric beside its threshold,
to 1 % of itself, and the critical sharpness.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import hessiankit as hk
from figures._kit import MACHINE, differentiable, write_json
from hessiankit.cli.text import load_text
from hessiankit.support.environment import environment
from hessiankit.training.monitoring import MonitorLog

NAME = Path(__file__).stem


@dataclass(frozen=True)
class Settings:
    """Sizes and steps."""

    steps: int = 250
    width: int = 128
    layers: int = 5
    tokens: int = 64
    sequences: int = 64
    every: int = 50
    learning_rate: float = 1e-3


QUICK = Settings(6, 8, 1, 8, 4, 2)


def trained(settings: Settings, path: Path) -> tuple[MonitorLog, float, int]:
    """Train with a monitor that writes to ``path``; return its log, the seconds of the whole run and the parameters' number."""
    path.unlink(missing_ok=True)
    text, held_out = load_text("stdlib"), load_text("stdlib", split="validation")
    data = held_out.batch(4, settings.tokens, torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]), differentiable():
        torch.manual_seed(0)
        width = settings.width
        model = hk.Transformer(256, width, 4 * width, settings.layers, n_heads=4, placement="pre", activation="gelu")
        optimizer, order = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate), torch.Generator().manual_seed(0)
        monitor = hk.Monitor(
            model, data, path, every=settings.every, optimizer=optimizer,
            what={"preconditioned": {"route": "autograd", "tol": 1e-2}, "critical": {}},
        )  # fmt: skip
        start = time.perf_counter()
        monitor.step(0)
        for step in range(1, settings.steps + 1):
            inputs, labels = text.batch(settings.sequences, settings.tokens, order)
            F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(step)
        seconds = time.perf_counter() - start
    return hk.Monitor.read(path), seconds, sum(p.numel() for p in model.parameters())


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train, print what the measurements took, and draw the run."""
    settings = QUICK if quick else Settings()
    path = out / f"{NAME}.jsonl"
    log, seconds, parameters = trained(settings, path)
    metric = [record["preconditioned"] for record in log.records if "value" in record["preconditioned"]]
    times = [record["seconds"] for record in log.records]
    measuring = sum(sum(taken.values()) for taken in times)
    about: dict[str, Any] = {
        "environment": environment(*MACHINE), "settings": asdict(settings), "parameters": parameters, "seconds": seconds,
        "measuring": measuring, "steps": log.steps.tolist(),
        **{key: [one[key] for one in metric] for key in ("products", "ratio", "residual", "value")},
        "passes": [record["critical"]["passes"] for record in log.records if "passes" in record["critical"]],
        **{f"seconds_{name}": [taken[name] for taken in times] for name in ("preconditioned", "critical")},
    }  # fmt: skip
    print(f"  {measuring:.1f} s of {seconds:.1f} s were measurements ({measuring / seconds:.1%}), at steps {about['steps']}")
    print(f"  products with the Hessian: {about['products']}; eigenvalue over the threshold: {about['ratio']}")
    picture = out / f"{NAME}{suffix}"
    log.plot(picture, title=f"GPT, {parameters:,} parameters, {settings.steps} steps of AdamW")
    return [picture, path, write_json(out / f"{NAME}.json", about)]
