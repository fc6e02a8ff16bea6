"""``python -m papers attack``."""

from __future__ import annotations

from hessiankit.cli.options import Output, Positive, Seed
from hessiankit.cli.program import INTERRUPTED, command

EXAMPLES = (
    ("python -m papers attack 100 --seed 7", "the largest norm / bound of problems 7 to 106"),
    ("python -m papers attack 1000 --json attack.json", "a campaign; all numbers in a file"),
)
app = command("attack", EXAMPLES, "a bound is exceeded")


@app.default
def run(problems: Positive, /, *, seed: Seed = 0, output: Output = Output()) -> int:
    """Try to violate the bounds of hessiankit bounds.

    Draw N problems of all norm placements and scales, climb from a tenth of them towards a bound, and print the largest norm /
    bound by bound. Problem k is drawn from --seed + k alone. An interrupt keeps the results so far.

    Args:
        problems: Number of problems.
        seed: Random seed of the first problem.
    """
    from hessiankit.support.progress import progress_bar
    from papers.curvature_gap.attack import attack

    with progress_bar() as tell:
        report = attack(problems, seed=seed, tell=tell)
    output.finish(report)
    return INTERRUPTED if report.interrupted else int(not report)
