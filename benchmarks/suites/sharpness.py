"""Cost of a measurement of sharpness: one draw beside a step of training, in time and in peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import real_sizes
from benchmarks.charts import methods
from benchmarks.fresh import OverBudget, run_fresh
from benchmarks.packaged import installed
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import DTYPES
from benchmarks.residence import Memory
from benchmarks.tables import CELL_HEADERS, cell_rows, markdown, ratio_text, short, time_text
from benchmarks.timing import all_rounds, spread, timed
from hessiankit.support.memory import available_memory
from hessiankit.training.sharpness import sharpness

MODELS = {"gpt2-0.1M": 64, "gpt2-124M": 512}
"""The tokens of a sequence that each is measured on."""
BATCHES = (4,)
DRAWS = 3
NEED = {"gpt2-0.1M": 1.0, "gpt2-124M": 8.0}
"""GiB that have to be free."""
TRAINING, FORWARD, ONE, SEVERAL, MORE = (
    "training step (forward, backward, AdamW)",
    "forward alone",
    "sharpness, 1 draw",
    f"sharpness, {DRAWS} draws",
    "one draw more",
)


def cells(plan: Plan) -> list[Cell]:
    """Return the models, in float32 where the plan has that dtype."""
    sizes = tuple(size for size in plan.sizes if size in MODELS)
    own = replace(plan, sizes=sizes, dtypes=("float32",) if "float32" in plan.dtypes else plan.dtypes)
    return [] if plan.sizes and not sizes else own.grid(tuple(MODELS), BATCHES)


class Work:
    """A model with its batch, and the pieces of work that are measured.

    Args:
        problem: A name in ``MODELS``.
        batch: Sequences.
        dtype: Name of the dtype.
        device: Where.
    """

    def __init__(self, problem: str, batch: int, dtype: str, device: str) -> None:
        case = real_sizes.make(f"{problem}-L{MODELS[problem]}", batch, DTYPES[dtype], device)
        self.inputs, self.target = case.inputs, case.target
        self.model: Any = case.module.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)  # the work of a step, and the parameters stay
        self.size = sum(p.numel() for p in self.model.parameters())

    def forward(self) -> Tensor:
        """Compute the logits, without a graph."""
        with torch.no_grad():
            return self.model(self.inputs).logits  # type: ignore[no-any-return]

    def train(self) -> None:
        """Make one step of training."""
        self.model.train()
        logits = self.model(self.inputs).logits
        cross_entropy(logits.flatten(0, 1), self.target.flatten()).backward()
        del logits
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()

    def sharpness(self, draws: int) -> dict[str, float]:
        """Measure the sharpness of every type."""
        report = sharpness(self.model, self.inputs, self.target, draws=draws)
        return {kind: one.value for kind, one in report.types.items()}


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    if not installed("transformers"):
        return {"skipped": "transformers is not installed"}
    free = available_memory(torch.device(plan.device)) / 2**30
    if free < NEED[cell["problem"]]:
        return {"skipped": f"about {NEED[cell['problem']]:g} GiB wanted, {free:.1f} GiB free"}
    settings = {**{key: cell[key] for key in ("problem", "batch", "dtype")}, "device": plan.device}

    def fresh(function: str, **more: Any) -> dict[str, Any]:
        where = f"benchmarks.suites.sharpness:{function}"
        return run_fresh(where, {**settings, **more}, threads=cell["threads"], seconds=plan.budget, tell=lambda *_: None)

    tell("times", 0, 3)
    found = fresh("times", repeats=plan.repeats, limit_seconds=plan.limit_seconds)
    rows = found["rows"]
    for k, what in enumerate((TRAINING, ONE), 1):
        tell(f"memory, {what}", k, 3)
        row = next(row for row in rows if row["name"] == what)
        try:
            row["bytes"] = fresh("peak", what=what)["bytes"]
        except OverBudget as error:
            row["why"] = f"memory over budget: {error}"
    return {"parameters": found["parameters"], "rows": rows, "types": found["types"]}


def times(problem: str, batch: int, dtype: str, device: str, repeats: int, limit_seconds: float, tell: Tell) -> dict[str, Any]:
    """Time every piece of work in turn, after one call of each on the smallest model. For a process of its own."""
    types: dict[str, float] = {}

    def jobs(work: Work) -> dict[str, Callable[[], Any]]:
        measured = {name: lambda draws=draws: types.update(work.sharpness(draws)) for name, draws in ((ONE, 1), (SEVERAL, DRAWS))}
        return {TRAINING: work.train, FORWARD: work.forward, **measured}

    for job in jobs(Work(next(iter(MODELS)), 1, dtype, device)).values():
        job()  # imports what is imported late, and starts the threads
    work = Work(problem, batch, dtype, device)
    calls = {name: lambda _, job=job: timed(device, job)[1] for name, job in jobs(work).items()}  # type: ignore[misc]
    seconds = all_rounds(calls, repeats, limit_seconds)
    seconds[MORE] = [(several - one) / (DRAWS - 1) for several, one in zip(seconds[SEVERAL], seconds[ONE], strict=True)]
    status = "right" if all(value > 0 for value in types.values()) else "wrong"
    rows = []
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds[TRAINING], strict=True)]
        row = {"name": name, "status": status, "why": "", "error": None, "bytes": None, "seconds": values, "time": spread(values)}
        rows.append({**row, "ratio": None if name == TRAINING else spread(ratios)})
    return {"parameters": work.size, "rows": rows, "types": types}


def peak(problem: str, batch: int, dtype: str, device: str, what: str, tell: Tell) -> dict[str, Any]:
    """Do one piece of work and return the most memory that the process held, the model included. For a process of its own."""
    work = Work(problem, batch, dtype, device)
    memory = Memory(device)
    return {"bytes": memory.before + memory.peak(work.train if what == TRAINING else lambda: work.sharpness(1))[1]}


def table(records: Sequence[dict[str, Any]]) -> str:
    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            held = "" if row["bytes"] is None else short(row["bytes"] / 2**30)
            yield row["name"], time_text(row), ratio_text(row), held

    return markdown([*CELL_HEADERS, "work", "time (s)", "of a training step", "peak (GiB)"], cell_rows(records, rows, 3))


BENCHMARK = Benchmark(
    "sharpness",
    "A measurement of sharpness on GPT-2 beside a step of its training.",
    cells,
    run,
    table,
    lambda records: methods(records, "Sharpness beside training", compared=False),
    "- B: number of sequences, of 512 tokens for `gpt2-124M` and of 64 for `gpt2-0.1M`. Both models are built from their\n"
    "  configurations with random parameters, and measured with one micro-batch.\n"
    f"- one draw more: the time with {DRAWS} draws less that with 1 draw, over {DRAWS - 1}. All draws share the forward pass.\n"
    "- of a training step: time over that of the training step in the same round. Before the rounds, each piece of work is\n"
    "  done once on the smallest model.\n"
    "- peak: highest resident size of a fresh process, the model included (on a GPU the allocator's).",
    isolate=False,
    title="Sharpness beside training",
)
