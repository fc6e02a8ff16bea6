"""The page of the papers' experiments, docs/experiments.md: every figure and table with its command, its sizes, and what was run.

``python docs/_site/experiments_page.py`` writes it from ``papers.experiments.catalogue``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from figures import accepted  # noqa: E402
from papers import PAPERS  # noqa: E402
from papers.experiments.catalogue import EXPERIMENTS, NO_RUN, PRESETS, Experiment, specs  # noqa: E402
from papers.experiments.forecast import agreement, forecast  # noqa: E402
from papers.experiments.train import RATE  # noqa: E402

PAGE = ROOT / "docs" / "experiments.md"
SMALL_RUNS = ROOT / "docs" / "small_runs"
HEAD = f"""# The papers' experiments

`python -m papers train PAPER/EXPERIMENT` trains the models of a figure or table: `--preset tiny` in seconds, `small` in
minutes on one core, `paper` at the printed size. Every number of a `paper` preset has its place of print, and `--dry-run`
prints them with parameters, tokens, memory and hours:

```bash
python -m papers train --list
python -m papers train curse-of-depth/table6 --preset tiny
python -m papers train hybridnorm/table4 --preset paper --dry-run
torchrun --nproc-per-node 8 -m papers train curse-of-depth/fig4 --preset paper --data /data/c4 --device cuda --micro 8 --out runs
python -m figures curse_of_depth_4_8 --run runs
python -m papers evaluate runs --tokenizer t5 --tasks arc_easy --tasks piqa
```

- **Data.** `--data` takes a folder of `.bin` shards (16-bit tokens, as nanoGPT writes them; those named `val*` are held
  out), a folder of `.parquet` files with a column `input_ids` (needs Hugging Face's `datasets`), a text or a folder of texts
  as bytes, or images as `.npz`. Nothing is downloaded. `tiny` and `small` read Python's standard library, or scikit-learn's
  digits.
- **Processes.** Under `torchrun` each process takes its part of every batch: DDP, or FSDP2 with `--shard`. `--micro` is the
  number of sequences a process takes at once; it turns on the recomputation of activations. The loss curve is that of one
  process to rounding; with experts the load balancing loss is a mean over the parts of a batch.
- **What a run writes.** `steps.jsonl` has a line a step (loss, learning rate, held-out loss), `monitor.jsonl` the
  measurements of [`Monitor`](monitoring.md) at the paper's steps, `run.pt` losses and models. The same command resumes from
  the last checkpoint (`--checkpoint` steps apart) with the same digits.
- **Other numbers.** `--set steps=200 --set optimizer=muon` changes attributes of a run; `--model`, `--arm` and `--seed`
  choose some runs.
- **Pictures.** `python -m figures NAME --run DIR` draws the paper's picture from the runs in a folder, with verdicts from
  their own size; without `--run` the small runs that the [gallery](gallery.md) shows. `trained_arms` draws any experiment.
  `curvature_gap_table_1` and `curvature_gap_theorem_1` have no `--run`: they are measured at initial weights, or on random
  problems, and nothing is trained for them.
- **Downstream tasks.** `python -m papers evaluate DIR` evaluates the models of a folder's runs by
  [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) (`pip install lm-eval`), zero-shot, and prints
  each accuracy beside the paper's. `--tasks` names tasks, by default those of the paper's table. `--include` is a folder of
  tasks of your own, and `--tokenizer` the tokenizer that made the shards; without it tokens are bytes.
  lm-evaluation-harness loads the data of its tasks from Hugging Face's hub or from its cache.

Hours are those of one device at {RATE:.3g} operations a second, 40 % of an A100's peak in bfloat16, all methods with one
seed: what only a cluster can do. `--rate 3e10` gives those of one core of a CPU, as measured on `small` Table 6. Every
experiment is trained at `tiny` size by the tests, and those that a gallery picture names at `small`; no `paper` preset has
been run.
"""


def hours(name: str) -> float:
    """Return the hours of a paper preset, all methods with one seed."""
    return sum(forecast(own[0]).hours(RATE) for own in specs(name, "paper").values())


def sizes(name: str, one: Experiment) -> str:
    """Return the parameters of the paper's models and of the small and tiny ones."""
    counts = []
    for preset in PRESETS:
        found = {size: forecast(own[0]).parameters for (size, _), own in specs(name, preset).items()}
        different = [
            size
            for size, count in found.items()
            if preset == "paper" and agreement(one.models[size], count).endswith(f"; {one.models[size].why}")
        ]
        low, high = min(found.values()), max(found.values())
        count = _short(low) if low == high else f"{_short(low)} to {_short(high)}"
        counts.append(count + (f" (not the print's: {', '.join(different)})" if different else ""))
    return " \\| ".join(counts)


def _short(count: int) -> str:
    unit, letter = next(((u, c) for u, c in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if count >= u), (1, ""))
    return f"{count / unit:.3g}{letter}"


def picture(one: Experiment) -> str:
    """Return how a run of an experiment is drawn."""
    options = accepted(one.figure)
    return f"`{one.figure}` {'`--run`' if 'run' in options else '`--images`' if 'images' in options else ''}".strip()


def small_runs(key: str) -> list[str]:
    """Return a line for each experiment of a paper that was run at small size and that no picture shows.

    ``python -m papers train EXPERIMENT --preset small --json docs/small_runs/PAPER-EXPERIMENT.json`` writes its rows.
    """
    lines = []
    for name, one in EXPERIMENTS.items():
        path = SMALL_RUNS / f"{name.replace('/', '-')}.json"
        if name.startswith(f"{key}/") and path.exists():
            ends: dict[str, list[str]] = {}
            for row in json.loads(path.read_text(encoding="utf-8")):
                model = f"{row['model']}, " if len(one.models) > 1 else ""
                ends.setdefault(f"{model}{row['method']}", []).append(f"{row['held-out loss']:.3f}")
            lines.append(f"- `{name}`: " + "; ".join(f"{method} {' and '.join(losses)}" for method, losses in ends.items()) + ".")
    return ["", "Run at `small`, not drawn (held-out nats a byte, a number a seed):", "", *lines] if lines else []


def page() -> str:
    """Return the page."""
    shown = json.loads((ROOT / "papers" / "small_scale.json").read_text(encoding="utf-8"))
    lines = [HEAD]
    for key, paper in PAPERS.items():
        own = {name: one for name, one in EXPERIMENTS.items() if name.startswith(f"{key}/")}
        none = {name: why for name, why in NO_RUN.items() if name.startswith(f"{key}/")}
        if not own:
            continue
        lines += [
            f"## {paper.title}",
            "",
            "| makes | experiment | methods | parameters: paper \\| small \\| tiny | paper: hours | figure |",
        ]
        lines.append("|---|---|--:|---|--:|---|")
        for name, one in own.items():
            cells = [
                one.shows,
                f"`{name}`",
                str(len(one.arms)),
                sizes(name, one),
                f"{hours(name):,.2f}" if hours(name) < 1 else f"{hours(name):,.0f}",
                picture(one),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        seen = {row: one for row, one in shown.items() if row.startswith(f"{key}/")}
        said = ", ".join(f"`{row}` ({one['verdict'].lower()})" for row, one in seen.items())
        lines += ["", f"Drawn in the [gallery](gallery.md) from small runs: {said}."]
        lines += small_runs(key)
        if none:
            lines += ["", "Without a training command:", ""]
            lines += [f"- `{name}`: {why}." for name, why in none.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
