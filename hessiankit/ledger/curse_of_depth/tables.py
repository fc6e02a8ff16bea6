"""Tables 1-8: what arithmetic can check."""

from __future__ import annotations

import math

from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.evidence import small, violated, wrong
from hessiankit.ledger.registry import claim

TABLE_1 = {
    "Post-LN": (26.95, 1409.79, 1368.33, 1390.75),
    "DeepNorm": (27.17, 22.77, 1362.59, 1409.08),
    "Mix-LN": (26.07, 21.39, 1363.21, 1414.78),
    "Pre-LN": (26.73, 21.92, 19.58, 17.02),
    "LNS": (25.76, 20.35, 18.20, 15.71),
}
TABLE_2 = {
    "250M": {
        "Post-LN": (22.95, 37.83, 26.94, 52.72, 26.17, 11.60, 49.56, 32.54),
        "DeepNorm": (23.60, 37.86, 36.62, 61.10, 25.69, 15.00, 49.57, 35.63),
        "Mix-LN": (26.53, 56.12, 41.68, 66.34, 30.16, 18.00, 50.56, 41.34),
        "Pre-LN": (24.93, 38.35, 40.15, 63.55, 26.34, 16.20, 49.01, 36.93),
        "LNS": (27.08, 58.17, 45.24, 67.38, 32.81, 18.80, 52.49, 43.14),
    },
    "1B": {
        "Post-LN": (22.95, 37.82, 25.08, 49.51, 25.04, 13.80, 49.57, 31.96),
        "DeepNorm": (23.35, 37.83, 27.06, 52.94, 26.19, 11.80, 49.49, 32.67),
        "Mix-LN": (23.19, 37.83, 25.08, 49.51, 25.04, 11.80, 49.57, 31.72),
        "Pre-LN": (26.54, 62.20, 45.70, 67.79, 30.96, 17.40, 50.51, 43.01),
        "LNS": (28.69, 61.80, 48.85, 67.92, 33.94, 18.60, 54.30, 44.87),
    },
}
TASK_NAMES = ("MMLU", "BoolQ", "ARC-e", "PIQA", "HellaSwag", "OBQA", "WinoGrande", "average")
TASKS = 7


def best(size: str) -> list[bool]:
    """Return for each task whether LNS has the best number of Table 2."""
    rows = TABLE_2[size]
    return [max(rows, key=lambda name: rows[name][k]) == "LNS" for k in range(TASKS)]


SMALL, LARGE = TABLE_2["250M"], TABLE_2["1B"]
HOLDING = (  # id, place, statement, found, as printed, rounding
    (
        "table1-differences",
        "Sec. 5.1",
        "'on LLaMA-130M and LLaMA-1B, LNS reduces perplexity by 0.97 and 1.31, respectively, compared to Pre-LN'",
        [TABLE_1["Pre-LN"][k] - TABLE_1["LNS"][k] for k in (0, 3)],
        [0.97, 1.31],
        1e-9,
    ),
    (
        "table2-averages",
        "Table 2, its averages",
        "the last column is the mean of the tasks (Post-LN at 1B is 31.967 and printed 31.96, the others are rounded)",
        [sum(row[:TASKS]) / TASKS for size in TABLE_2.values() for row in size.values()],
        [row[TASKS] for size in TABLE_2.values() for row in size.values()],
        0.0072,
    ),
    (
        "table2-gains",
        "Sec. 5.2",
        "at 250M 1.80 % on average and 3.56 % on ARC-e over Mix-LN; at 1B 1.86 % over the best baseline",
        [
            *(SMALL["LNS"][k] - SMALL["Mix-LN"][k] for k in (TASKS, 2)),
            LARGE["LNS"][TASKS] - max(row[TASKS] for name, row in LARGE.items() if name != "LNS"),
        ],
        [1.80, 3.56, 1.86],
        1e-9,
    ),
    (
        "table3-perplexity",
        "Table 3, its numbers",
        r"perplexities are $e^{\mathrm{loss}}$: 19.30 and 17.28 for 2.96 and 2.85",
        [math.log(19.30), math.log(17.28)],
        [2.96, 2.85],
        0.0051,
    ),
)
"""Statements on printed numbers that hold."""


def _enter(id: str, place: str, statement: str, found: list[float], printed: list[float], rounding: float) -> None:
    @claim(f"curse-of-depth/{id}", place, "HOLDS", statement=statement)
    def row(seed: int) -> Evidence:
        return small(
            [abs(a - b) for a, b in zip(found, printed, strict=True)], "largest difference, from the table", below=rounding
        )


for _row in HOLDING:
    _enter(*_row)


@claim("curse-of-depth/table2-tasks", "Sec. 5.2", "WRONG AS PRINTED")
def table2_tasks(seed: int) -> Evidence:
    """'across eight downstream tasks'

    Correct: seven, in Table 2
    """
    columns = [name for name in TASK_NAMES if name != "average"]
    return wrong(8.0, float(len(columns)), "columns of Table 2 but the average", corrected=float(len(LARGE["LNS"]) - 1))


@claim("curse-of-depth/table2-all", "Sec. 5.2", "WRONG AS PRINTED")
def table2_all(seed: int) -> Evidence:
    """LNS 'consistently surpasses other normalization techniques in all evaluated datasets'

    Correct: in all but BoolQ at 1B, where Pre-LN has 62.20 against 61.80
    """
    best = [max(rows, key=lambda name: rows[name][k]) for rows in (SMALL, LARGE) for k in range(TASKS)]
    second = sum(rows["LNS"][k] >= max(row[k] for row in rows.values()) for rows in (SMALL, LARGE) for k in range(TASKS))
    return wrong(2.0 * TASKS, float(best.count("LNS")), "columns of both sizes in which LNS is best", corrected=float(second))


@claim("curse-of-depth/table2-seven-of-eight", "Sec. 5.2", "WRONG AS PRINTED")
def table2_seven(seed: int) -> Evidence:
    """at 1B LNS is best 'on seven out of eight tasks'

    Correct: six of seven
    """
    found = sum(LARGE["LNS"][k] > LARGE[name][k] for k in range(TASKS) for name in LARGE if name == "Pre-LN")
    detail = "columns of 1B in which LNS is best: Pre-LN's 62.20 on BoolQ is above its 61.80"
    return wrong(7.0, float(best("1B").count(True)), detail, corrected=float(found))


@claim("curse-of-depth/table6-factor", "Sec. 6", "WRONG AS PRINTED")
def table6_factor(seed: int) -> Evidence:
    r"""'a larger scaling factor proves beneficial: Scaled Initialization yields lower perplexity compared to Depth-Scaled'

    Correct: Scaled Initialization has the smaller factor: $\frac{1}{\sqrt{2L}}\le\frac{1}{\sqrt{2l}}$; it is the stronger
    scaling
    """
    L = 12
    scaled, depth_scaled = 1 / math.sqrt(2 * L), [1 / math.sqrt(2 * layer) for layer in range(1, L + 1)]
    detail = "1 / sqrt(2 l) against 1 / sqrt(2 L), L = 12; 'larger' the other way round"
    return violated(depth_scaled, [scaled] * L, detail, corrected=[depth_scaled[0]] * L)
