"""``python -m papers train``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hessiankit.cli.options import Flag, Json, Positive, PositiveNumber, Seed
from hessiankit.cli.program import OK, command
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.files import write_json

if TYPE_CHECKING:
    from papers.experiments.spec import Spec

EXAMPLES = (
    ("python -m papers train --list", "the experiments, and what each makes of its paper"),
    ("python -m papers train curse-of-depth/table6 --preset tiny", "all methods in a minute: shows that all works"),
    ("python -m papers train hybridnorm/table4 --preset paper --dry-run", "printed numbers with their places, parameters, hours"),
    (
        "torchrun --nproc-per-node 8 -m papers train curse-of-depth/fig4 --preset paper --data /data/c4 --device cuda --micro 8",
        "the paper's size, on tokenised shards",
    ),
)
RATE = 1.25e14
"""Operations a second of the dry run's hours: 40 % of an A100's 3.12e14 in bfloat16, as well-kept trainers reach."""
app = command("train", EXAMPLES)


@app.default
def run(
    experiment: str | None = None,
    /,
    *,
    list: Flag = False,
    preset: Literal["paper", "small", "tiny"] = "tiny",
    model: str | None = None,
    arm: str | None = None,
    seed: Seed | None = None,
    data: str | None = None,
    device: str = "cpu",
    out: Path = Path("results/train"),
    dry_run: Flag = False,
    rate: PositiveNumber = RATE,
    shard: Flag = False,
    micro: Positive | None = None,
    checkpoint: Positive = 1000,
    set: tuple[str, ...] = (),
    output: Json = Json(),
) -> int:
    """Train the models of a paper's experiment, and resume what was interrupted.

    Under torchrun the processes share every batch. A run writes a line of JSON a step, what its monitor measures, and
    checkpoints; the same command goes on from the last one with the same digits.

    Args:
        experiment: Paper and experiment, e.g. curse-of-depth/table6.
        list: Name the experiments and what they make.
        preset: paper: the printed numbers; small: minutes on one core; tiny: seconds.
        model: Only this model of the paper.
        arm: Only this method.
        seed: Only this seed.
        data: A folder of .bin shards of 16-bit tokens or of .parquet files, a text or a folder of texts, or images as .npz.
        device: Device of the models, e.g. cuda.
        out: Folder for the runs.
        dry_run: Print parameters, tokens, memory and hours, and train nothing.
        rate: Operations a second of one device, for the hours of --dry-run.
        shard: Each process holds a part of the parameters (FSDP2); without it each holds all (DDP).
        micro: Sequences that a process takes at once; activations are then computed again in the backward pass.
        checkpoint: Steps from one checkpoint to the next.
        set: Other numbers than the preset's, e.g. --set steps=200 --set optimizer=muon.
    """
    from papers.experiments.catalogue import EXPERIMENTS, experiment_of
    from papers.experiments.forecast import dry_run as forecast_page

    if list or experiment is None:
        width = max(map(len, EXPERIMENTS))
        for name, one in EXPERIMENTS.items():
            print(f"{name:{width}}  {one.shows}: {', '.join(one.models)}; {len(one.arms)} methods")
        return OK
    runs = chosen(experiment, preset, model, arm, seed, data, set)
    if dry_run:
        print(forecast_page(experiment, experiment_of(experiment), preset, runs, rate))
        return OK
    if preset == "paper" and data is None:
        what = experiment_of(experiment).recipe.data
        raise InputError(f"train: the paper's preset reads its data from --data: {what}; nothing is downloaded")
    rows = trained(runs, out / experiment.replace("/", "-") / preset, device, checkpoint, sharded=shard, micro=micro)
    write_json("train", output.json, rows)
    return OK


def chosen(
    experiment: str,
    preset: str,
    model: str | None = None,
    arm: str | None = None,
    seed: int | None = None,
    data: str | None = None,
    changes: tuple[str, ...] = (),
) -> dict[tuple[str, str], list[Spec]]:
    """Return the runs that options choose."""
    from papers.experiments.catalogue import experiment_of, specs
    from papers.experiments.spec import Spec
    from papers.experiments.tokens import fitted

    one = experiment_of(experiment)
    for option, name, known in (("--model", model, one.models), ("--arm", arm, one.arms)):
        if name is not None:
            check_name("train", option, name, known)
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        check_name("train", "--set", name, Spec.__dataclass_fields__)
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    values = {name: value for name, value in vars(Spec.of({"name": "", **values})).items() if name in values}
    runs = specs(experiment, preset, seeds=None if seed is None else (seed,), **values)
    runs = {key: own for key, own in runs.items() if model in (None, key[0]) and arm in (None, key[1])}
    if data is not None:
        fit = (lambda spec: replace(spec, text=data)) if preset == "paper" else (lambda spec: fitted(spec, data))
        runs = {key: [fit(spec) for spec in own] for key, own in runs.items()}
    return runs


def trained(
    runs: dict[tuple[str, str], list[Spec]], out: Path, device: str, checkpoint: int, **options: Any
) -> list[dict[str, Any]]:
    """Train runs below a folder, and return a row of each; the first process prints them."""
    import math

    from hessiankit.support.tables import as_text, table
    from papers.experiments.runs import ranks_of, train_run

    ranks = ranks_of(device, recompute=options.get("micro") is not None, **options)
    rows = []
    for spec in (spec for own in runs.values() for spec in own):
        found = train_run(spec, out / spec.name, ranks=ranks, every=checkpoint)
        last = found.losses[-1]
        row = {"model": spec.size, "method": spec.arm, "seed": spec.seed, "held-out loss": last, "diverged": found.diverged}
        rows.append({**row, "perplexity": math.exp(last) if last < math.log(1e9) else math.inf, "seconds": found.seconds})
    if ranks.rank == 0:
        cells = [[f"{x:.5g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
        print(as_text(table(list(rows[0]), cells, title=str(out))))
    return rows
