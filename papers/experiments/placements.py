"""``python -m papers placements``."""

from __future__ import annotations

from pathlib import Path

from hessiankit.cli.options import Json, Positive, Seed
from hessiankit.cli.program import command
from hessiankit.support.files import write_json

EXAMPLES = (
    ("python -m papers placements --placement hybridnorm --sample 8", "eight tiny language models of one norm placement"),
    ("python -m papers placements --sample 1078", "22 of each placement; docs/placement_grid.md is made so"),
)
app = command("placements", EXAMPLES, "something disagrees")


@app.default
def run(
    *,
    placement: list[str] | None = None,
    sample: Positive | None = None,
    seed: Seed = 0,
    jobs: Positive = 1,
    out: Path = Path("results/placements"),
    output: Json = Json(),
) -> int:
    """Check the exact Hessian of every norm placement, in every combination of options.

    Compute the exact Hessian of tiny language models for every norm placement, combined with every kind of norm, activation,
    heads, mask, depth and loss (half an hour on one core), and compare it block pair by block pair with references that take
    other routes. After an interruption the same command goes on.

    Args:
        placement: Only this placement's part of the grid (may be repeated).
        sample: Only so many cases, drawn by --seed, the placements taking turns.
        seed: Random seed of the sample.
        jobs: Processes that share the work.
        out: Folder for the results.
    """
    from papers.experiments.placement_grid import run_placements

    words = ["python -m papers placements", *(f"--placement '{name}'" for name in placement or ())]
    words += [f"--sample {sample} --seed {seed}"] if sample else []
    result = run_placements(placement, sample=sample, seed=seed, jobs=jobs, out=out, command=" ".join(words))
    write_json("placements", output.json, result)
    return int(bool(result["failed"]))
