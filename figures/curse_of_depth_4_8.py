"""Figures 4 and 8 of The Curse of Depth: the variance of each layer's output while training, and how it grows with depth.

Figure 4 of the paper follows the variance of every layer of LLaMA-130M for 10,000 steps: with Pre-LN, scaled initialisation or
not, up to 175 in the last layer, with LayerNorm Scaling (LNS) up to 25. Figure 8 plots Pre-LN's variance against depth at steps
1000, 3000 and 6000 and calls it exponential; nothing is fitted. How the variance is averaged is not said.

Here: twelve blocks of width 64 on the bytes of Python's standard library, 400 steps, two seeds
(``papers.experiments.catalogue``, curse-of-depth/fig4); the variance over features, a mean over 1024 held-out tokens. Below,
four laws of two coefficients each are fitted to x_1, ..., x_13 by least squares
(:func:`hessiankit.training.depth.growth_laws`) at 10 %, 30 % and 100 % of the steps.
For weights of one size at all depths theory allows L to L^2 for Pre-LN and log L to L for LNS (docs/depth.md): the
exponential bound in print is never attained there, but training may leave that assumption.

The criteria are Sec. 5.4's words: LNS suppresses the growth, and the last layer's variance is up to 175 with and without scaled
initialisation and capped at about 25 with LNS, so 7 times as large.

What came out: the order of Figure 4, not its size: 2.7 to 3.1 times with Pre-LN, 1.1 to 1.3 with scaled initialisation. After
400 steps the last block's output has a variance of 7.8 with Pre-LN, 3.3 with scaled initialisation and 2.5 and 2.9 with LNS,
the embedding 0.3 to 0.4; all were higher before, Pre-LN's 15 at step 100. Of the four laws Pre-LN's variance is nearest to the
exponential one early, at step 40 (R^2 1.000 and 0.998; the quadratic one 0.95 and 0.93), and to the quadratic one at steps 120
and 400 (0.997 to 0.998; exponential 0.987 to 0.991). LNS's is quadratic at step 40 (0.996, 0.992) and logarithmic at the end
(0.989, 1.000). So Figure 8's "exponential" is seen during the warm-up and not after it; with 13 points and two coefficients,
0.99 against 0.997 is no wide margin. LNS pays for it here: its held-out loss is 2.19 and 2.22, Pre-LN's 2.04 and 2.06.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from figures._kit import DASHES, FAINT, METHOD_COLOURS, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import Arms, arms, over_training, spec_of
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.curvature.plot_frame import Picture
from hessiankit.training.depth import GrowthLaws, growth_laws
from hessiankit.training.depth.laws import FORMS, SHAPES
from hessiankit.training.monitoring.log import layer_key
from papers.experiments.spec import Spec, scale_of

NAME = Path(__file__).stem
METHODS = ("Pre-LN", "Pre-LN, scaled init", "LNS")
FITTED = ("Pre-LN", "LNS")
STAGES = (0.1, 0.3, 1.0)
SHORT = {"logarithmic": "log", "linear": "linear", "quadratic": "quadratic", "exponential": "exp"}


@dataclass(frozen=True)
class Followed:
    """Variances of one run.

    Attributes:
        method: Its method.
        seed: Its seed.
        steps: Steps of the measurements, (steps,).
        variance: Of x_1, ..., x_{L+1} there, (steps, L + 1); x_1 is the embedding, x_{l+1} the output of block l.
    """

    method: str
    seed: int
    steps: np.ndarray
    variance: np.ndarray

    def at(self, step: int) -> np.ndarray:
        """Return the variances (L + 1,) at the measured step that is nearest."""
        nearest: np.ndarray = self.variance[int(np.abs(self.steps - step).argmin())]
        return nearest


def follow(runs: Arms) -> list[Followed]:
    """Return the variances of every run."""
    return [
        Followed(method, run.spec.seed, run.log.steps, run.log.series("depth", "stream", "variance"))
        for method, own in runs.items()
        for run in own
        if run.log is not None
    ]


def seeds_of(found: Sequence[Followed]) -> list[int]:
    """Return the seeds."""
    return sorted({one.seed for one in found})


def stages(size: Spec) -> tuple[int, ...]:
    """Return the steps at which laws are fitted.

    >>> stages(Spec("x", steps=400))
    (40, 120, 400)
    """
    return tuple(round(part * size.steps) for part in STAGES)


def fits(found: Sequence[Followed], size: Spec) -> Iterator[tuple[Followed, int, GrowthLaws]]:
    """Yield (run, step, its laws) at the initialisation and at every stage."""
    for one in found:
        for step in (0, *stages(size)):
            yield one, step, growth_laws(one.at(step).tolist())


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train six models (about 3.5 minutes of one core, fewer if other figures trained some before), draw, and write the numbers.

    ``quick`` takes four blocks of width 16 and 30 steps: seconds.
    """
    runs = arms("curse-of-depth/fig4", out, quick=quick, run=run, text=text)
    size, found = spec_of(runs), follow(runs)
    variances = [
        {"method": one.method, "seed": one.seed, "step": step, "output of block": block, "variance": value}
        for one in found
        for step, row in zip(one.steps.tolist(), one.variance.tolist(), strict=True)
        for block, value in enumerate(row)
    ]
    fitted = [
        {
            "method": one.method, "seed": one.seed, "step": step, "law": law.name, "form": FORMS[law.name], "a": law.a,
            "b": law.b, "r_squared": law.r_squared, "growth exponent": laws.exponent,
        }
        for one, step, laws in fits(found, size)
        for law in laws.laws.values()
    ]  # fmt: skip
    said = verdicts(found, size)
    with style():
        drawn = save(picture(found, size), out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", variances), write_rows(out / f"{NAME}_laws.csv", fitted)]
    return [drawn, *numbers, write_verdicts(out, NAME, said)]


def verdicts(found: Sequence[Followed], size: Spec) -> list[Verdict]:
    """Return what the runs show of Figures 4 and 8: one outcome a seed."""
    scale = scale_of(size, len(seeds_of(found)))
    last = {method: [one.variance[-1, -1] for one in found if one.method == method] for method in METHODS}
    fig4 = [
        in_every(
            f"the last block's variance with {method} is 7 times LNS's",
            (a > 7 * b for a, b in zip(last[method], last["LNS"], strict=True)),
            f"{each(last[method])} against {each(last['LNS'])}, in print up to 175 against about 25",
            direction=(a > b for a, b in zip(last[method], last["LNS"], strict=True)),
        )
        for method in METHODS
        if method != "LNS"
    ]
    fig8, missing = [], unreached(steps=(size.steps, 1000))
    for step in stages(size):
        laws = [law for one, at, law in fits(found, size) if one.method == "Pre-LN" and at == step]
        seen = ", ".join(f"{law.best} {law.laws[law.best].r_squared:.3f}" for law in laws)
        best = (x.best == "exponential" for x in laws)
        fig8.append(in_every(f"at step {step} the exponential law fits best", best, seen, missing))
    return [
        Verdict("curse-of-depth/fig4", "LNS keeps the variance of the last block a seventh of Pre-LN's", scale, tuple(fig4)),
        Verdict("curse-of-depth/fig8", "with Pre-LN the variance grows exponentially with depth", scale, tuple(fig8)),
    ]


def picture(found: Sequence[Followed], size: Spec) -> Picture:
    """Draw Figure 4 above, of the first seed, and Figure 8 below for Pre-LN and for LNS."""
    seeds = seeds_of(found)
    first = {one.method: one for one in found if one.seed == seeds[0]}
    with style():
        figure = page(7.6, 6.9)
        figure.text(0.07, 0.975, "Variance of the residual stream by layer (The Curse of Depth, Figures 4 and 8)", fontsize=10)
        others = f", crosses seed {', '.join(map(str, seeds[1:]))}" if seeds[1:] else ""
        note = f"below: dots are seed {seeds[0]}{others}; laws fitted to seed {seeds[0]}, with their $R^2$"
        figure.text(0.07, 0.952, note, fontsize=7.5, color=FAINT)
        grid = figure.add_gridspec(3, 3, left=0.07, right=0.905, top=0.91, bottom=0.06, hspace=0.42, wspace=0.24)
        top = [figure.add_subplot(grid[0, k]) for k in range(len(METHODS))]
        limits = _limits(np.concatenate([one.variance.ravel() for one in first.values()]))
        for k, (axes, method) in enumerate(zip(top, METHODS, strict=True)):
            heading(axes, method, "step", "variance" if k == 0 else "")
            over_training(axes, first[method].steps, first[method].variance, limits)
        layer_key(top[-1], 0, size.layers)
        for row, method in enumerate(FITTED, start=1):
            for k, step in enumerate(stages(size)):
                axes = figure.add_subplot(grid[row, k])
                heading(axes, f"{method}, step {step}", "output of block $l$ (0: embedding)", "variance" if k == 0 else "")
                over_depth(axes, [one for one in found if one.method == method], step)
    return figure


def over_depth(axes: Axes, runs: Sequence[Followed], step: int) -> None:
    """Points of every seed, the laws fitted to the first seed's, and their R^2."""
    first = runs[0].at(step)
    laws = growth_laws(first.tolist())
    layers = np.linspace(1, len(first), 200)
    for name, colour, dashes in zip(FORMS, METHOD_COLOURS[1:], DASHES, strict=False):
        law = laws.laws[name]
        curve = law.a * np.exp(law.b * layers) if name == "exponential" else law.a + law.b * SHAPES[name](layers)
        axes.plot(layers - 1, curve, color=colour, linestyle=dashes, label=f"{SHORT[name]} {law.r_squared:.3f}")
    for k, one in enumerate(runs):
        values = one.at(step)
        axes.plot(range(len(values)), values, "o" if k == 0 else "x", color="black" if k == 0 else FAINT, zorder=4 - k)
    axes.set_ylim(0, 1.45 * max(float(one.at(step).max()) for one in runs))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.legend(loc="upper left", ncols=2, fontsize=6.5, labelspacing=0.2, columnspacing=0.8, handlelength=1.6)


def _limits(values: np.ndarray) -> tuple[float, float]:
    return 0.9 * float(values.min()), 1.1 * float(values.max())
