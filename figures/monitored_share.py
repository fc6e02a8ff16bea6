"""A GPT of a million parameters with a tenth of the time for a monitor: AdamW's own metric every 50 steps, and the next step.

A pre-norm GPT (5 layers, width 128, 64 bytes) on Python's standard library in float32, AdamW 1e-3, 64 sequences a step. The
monitor measures 4 held-out sequences every 50 steps with ``share=0.1``: the loss, the top eigenvalue in the optimizer's metric
beside its threshold, to 1 % of itself, and the critical sharpness; the last step is forced. The same run once more searches
from a random vector at every measurement, for the products that a warm start saves.
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
from hessiankit.diagnostics.monitoring import MonitorLog
from hessiankit.support.environment import environment

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
    share: float = 0.1
    learning_rate: float = 1e-3


QUICK = Settings(6, 8, 1, 8, 4, 2)


def trained(settings: Settings, path: Path, *, warm: bool) -> tuple[MonitorLog, float, int]:
    """Train with a monitor that writes to ``path``; return its log, the seconds of the whole run and the parameters' number."""
    path.unlink(missing_ok=True)
    text, held_out = load_text("stdlib"), load_text("stdlib", split="validation")
    data = held_out.batch(4, settings.tokens, torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "sharpness": False,
        "norms": False,
        "eigenvalue_route": "autograd",
    }
    with torch.random.fork_rng(devices=[]), differentiable():
        torch.manual_seed(0)
        width = settings.width
        model = hk.Transformer(256, width, 4 * width, settings.layers, n_heads=4, placement="pre", activation="gelu")
        optimizer, order = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate), torch.Generator().manual_seed(0)
        monitor = hk.Monitor(
            model, data, path, every=settings.every, share=settings.share, optimizer=optimizer, eigenvalue_tol=1e-2,
            warm_starts=warm, **options,
        )  # fmt: skip
        start = time.perf_counter()
        monitor.step(0)
        for step in range(1, settings.steps + 1):
            inputs, labels = text.batch(settings.sequences, settings.tokens, order)
            F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(step, force=step == settings.steps)
        seconds = time.perf_counter() - start
    return hk.Monitor.read(path), seconds, sum(p.numel() for p in model.parameters())


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train with warm and with cold searches, print what the measurements took, and draw the first run."""
    settings = QUICK if quick else Settings()
    path = out / f"{NAME}.jsonl"
    about: dict[str, Any] = {"environment": environment(*MACHINE), "settings": asdict(settings), "runs": {}}
    for name, warm in (("cold", False), ("warm", True)):  # the file that stays is of the warm one
        log, seconds, about["parameters"] = trained(settings, path, warm=warm)
        metric = [record["preconditioned"] for record in log.records if "value" in record.get("preconditioned", {})]
        times = [record["time"] for record in log.records]
        spent = times[-1]["measuring"]
        about["runs"][name] = {
            "seconds": seconds, "measuring": spent, "share": spent / seconds, "steps": log.steps.tolist(),
            **{key: [one[key] for one in metric] for key in ("products", "ratio", "residual", "value")},
            "passes": [record["critical"]["passes"] for record in log.records if "passes" in record.get("critical", {})],
            "left_out": [one["left_out"] for one in times], "skipped": [one["skipped"] for one in times],
        }  # fmt: skip
        run = about["runs"][name]
        print(f"  {name}: {spent:.1f} s of {seconds:.1f} s were measurements ({run['share']:.1%}), at steps {run['steps']}")
        print(f"  products with the Hessian: {run['products']}; eigenvalue over the threshold: {run['ratio']}")
    picture = out / f"{NAME}{suffix}"
    log.plot(picture, title=f"GPT, {about['parameters']:,} parameters, {settings.steps} steps, a tenth of the time to measure")
    return [picture, path, write_json(out / f"{NAME}.json", about)]
