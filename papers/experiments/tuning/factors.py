"""The two comparisons of learning rates by block type, between which one factor is changed at a time.

``python -m papers.experiments.tuning.factors FOLDER`` prints a table: the model of ``python -m figures
sharpness_disparity_4_10_table_2`` (34 thousand parameters), the same with one factor of the model of ``python -m papers tune-lr``
(0.17 million), and that model, each at the best learning rates of AdamW in the two comparisons. About 25 minutes of one core;
finished runs are kept in the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from papers.experiments.tuning.experiment import PAPER, RunSpec, Setting, digest_of, ratios_of
from papers.experiments.tuning.store import Runs
from papers.experiments.tuning.verdict import mean_interval, paired_difference

SMALL = Setting(steps=300, batch_size=16, length=32, layers=2, d_model=32, heads=2, evaluations=15, windows=128)
LARGE = Setting()
SETTINGS = {
    "34k": SMALL,
    "34k, 400 steps": replace(SMALL, steps=LARGE.steps),
    "34k, sequences of 64": replace(SMALL, length=LARGE.length),
    "34k, 3 blocks": replace(SMALL, layers=LARGE.layers),
    "34k, width 64": replace(SMALL, d_model=LARGE.d_model, heads=LARGE.heads),
    "0.17M": LARGE,
}
RATES = (0.00283, 0.00566)
"""AdamW's best learning rates of the two comparisons."""
ARMS = {"AdamW": (), "eq. (5)": PAPER, "Emb x 10": ratios_of({"Emb": 10.0})}
SEEDS, LARGE_SEEDS = 5, 3
"""A run of the large model takes ten times as long as one of the small."""


def rows(runs: Runs) -> Iterator[str]:
    """Yield the table's rows: held-out loss of AdamW, and differences from it, paired by seed, with 95 % intervals."""
    for name, setting in SETTINGS.items():
        setting = replace(setting, digest=digest_of(setting.text))
        for lr in RATES:
            seeds = range(LARGE_SEEDS if name == "0.17M" else SEEDS)
            specs = {arm: [RunSpec(setting, lr, ratios, seed) for seed in seeds] for arm, ratios in ARMS.items()}
            known = runs([spec for each in specs.values() for spec in each])
            base, *others = ([known[spec].final for spec in each] for each in specs.values())
            cells = [name, f"{lr:g}", str(len(base)), str(mean_interval(base))]
            yield " | ".join(["", *cells, *(str(paired_difference(other, base)) for other in others), ""]).strip()


def main(folder: Path) -> None:
    """Do the runs that are missing, and print the table."""
    heads = ["model", "lr", "seeds", "AdamW", *(f"{arm} minus AdamW" for arm in list(ARMS)[1:])]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    with Runs(folder / "factors.jsonl") as runs:
        for row in rows(runs):
            print(row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
