"""Figures 6 and 12 of Closing the Curvature Gap: a growing data set, the controls, and the test that Theorem 7 asks for.

The paper. Figure 6: a CIFAR-100 classifier at a fixed checkpoint w*; samples are added one batch after the other, and
|L_{k+1}(w*) - L_k(w*)| is drawn against their number in log-log scale, with a moving average and a line; the slope of -1 is
taken as support for Theorem 7. Figure 12: Assumption 1, that the gradient of L_k vanishes at w* for all k, "increasingly valid"
with the number of samples; what its axis shows is not stated.

The protocol cannot show what it claims: L_{k+1} - L_k = (l_{k+1} - L_k)/(k + 1) for any fixed numbers l, so that the slope is -1
whatever they are, and at w = w* the Hessian's term of the theorem is 0. First picture: (a) the protocol on the digits' classifier
of Table 1's first row, one order of the samples; (b) averaged over 200 orders, with its two controls: the same model untrained,
and uniform random numbers without any model; (c) the same times k + 1, which is all that the losses decide; (d) Figure 12 as
||grad L_k(w*)||, at the initial weights, at an ordinary checkpoint, and near a minimum of L_n that does not interpolate: 300
steps of L-BFGS on a classifier of 274 parameters, 3 in 10 labels drawn at random.

Second picture, the test: w = w* + t u along a random unit vector u. Left: the change of L_{k+1} - L_k from w* to w, times k + 1,
and the gradient's and the Hessian's terms of its Taylor series, medians over k. Middle: the correlation, over k, of the change
with the Hessian's term alone and with both. Right: the repaired theorem (``papers.curvature_gap.loss_surface``) for a post-norm
block that takes noise off digits, squared error: the change, the bound and its three terms, and the bound over the change.

What came out: slopes of -0.992 (trained), -0.996 (untrained) and -0.997 (random numbers). ||grad L_n(w*)|| is 0.71 at the
checkpoint of 1000 steps, no less than the 0.63 at the initial weights: it settles, and not at 0. Near the minimum it stays above
1/sqrt(k) and falls to 0.07 as k comes to n, because it is the mean over these n that was made small.
The Hessian explains the change only in a window: at the checkpoint its term has a correlation of 0.36 with the change while
||w - w*|| < 0.02, where the gradient's term is all there is, at most 0.79 at a distance of 1, and 0.24 at 4.6, where the Taylor
series has no say. Both terms together: at least 0.97 up to a distance of 1. The bound is 1.0 times the change at 1e-5, where it
is the loss term alone, 64 times at 1e-3, and 5e11 times at 1e-2: a valid one, which the curvature's term empties.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

import hessiankit
from figures._digits import LOSS, ImageSpec, classifiers, images_of, scale_of_images, snapshots
from figures._kit import (
    CODE,
    DASHES,
    FAINT,
    METHOD_COLOURS,
    cached,
    heading,
    page,
    save,
    style,
    write_json,
    write_rows,
    write_verdicts,
)
from figures._verdicts import Verdict, in_every
from hessiankit.blocks import TransformerBlock
from hessiankit.support.progress import progress_bar
from papers.curvature_gap.convergence import average_differences, running_means, slope
from papers.curvature_gap.loss_surface import SurfaceReport, loss_surface_bound
from papers.drawing import Draw
from papers.experiments.training import updates

NAME = Path(__file__).stem
TINY: Any = {"d_model": 4, "d_ff": 8, "activation": "gelu"}
"""A classifier that cannot fit every label of :func:`noisy`: single samples keep their gradients at a minimum of the mean."""
MEASURED_BY = (*CODE, "papers/curvature_gap/loss_surface.py", "figures/_digits.py", f"figures/{NAME}.py")
POINTS = ("trained", "untrained", "uniform random numbers")
ORDERS = 200


def noisy(labels: Tensor, classes: int) -> Tensor:
    """Return labels of which 3 in 10 are drawn at random.

    >>> 0.2 < float((noisy(torch.zeros(1000, dtype=torch.long), 10) != 0).double().mean()) < 0.34
    True
    """
    generator = torch.Generator().manual_seed(0)
    anew = torch.rand(len(labels), generator=generator) < 0.3
    return torch.where(anew, torch.randint(0, classes, (len(labels),), generator=generator), labels)


def vector(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def moved(model: nn.Module, w: Tensor) -> nn.Module:
    """Return a copy of a model at other weights."""
    other = copy.deepcopy(model)
    nn.utils.vector_to_parameters(w.clone(), other.parameters())
    return other


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each sample, (n,)."""
    return F.cross_entropy(model(tokens), labels, reduction="none")


def gradients(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each sample's loss, n x P."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(p: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x[None],)), t[None])

    found = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), chunk_size=64)(parameters, tokens, labels)
    return torch.cat([found[name].reshape(len(tokens), -1) for name in parameters], 1)


def gradient_norms(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return ||grad L_k||, k = 1 ... n."""
    k = torch.arange(1, len(tokens) + 1, dtype=torch.float64)
    return gradients(model, tokens, labels).cumsum(0).norm(dim=1) / k


def second_derivatives(model: nn.Module, tokens: Tensor, labels: Tensor, direction: Tensor) -> Tensor:
    """Return u^T H_i u of each sample's Hessian, (n,)."""
    found = []
    with progress_bar() as tell:
        for i in range(len(tokens)):
            tell("second derivatives, sample by sample", i, len(tokens))
            H = hessiankit.hessian_operator(model, tokens[i : i + 1], labels[i : i + 1], loss=LOSS)
            found.append(direction @ (H @ direction))
    return torch.stack(found)


def converged(model: nn.Module, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return the weights after L-BFGS on all samples, up to ``steps`` iterations."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, tolerance_grad=1e-9, tolerance_change=0.0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return vector(model)


def against_mean(values: Tensor) -> Tensor:
    """Return v_{k+1} less the mean of v_1 ... v_k, k = 1 ... n - 1: (k + 1) times what the mean changes by.

    >>> against_mean(torch.tensor([1.0, 3.0, 5.0])).tolist()
    [2.0, 3.0]
    """
    return values[1:] - running_means(values)[:-1]


@dataclass(frozen=True)
class Distance:
    """One distance ||w - w*|| = t; every number is times k + 1, medians over k.

    Attributes:
        t: The distance.
        change: |(L_{k+1} - L_k)(w) - (L_{k+1} - L_k)(w*)|.
        gradient_term: |(grad L_{k+1} - grad L_k)(w*)^T (w - w*)|: 0 under the paper's Assumption 1.
        hessian_term: 1/2 |(w - w*)^T (H_{k+1} - H_k)(w*) (w - w*)|.
        rest: |change less both terms|, before the absolute values.
        correlation_hessian: of the signed change with the Hessian's term alone, over k.
        correlation_both: with both terms.
    """

    t: float
    change: float
    gradient_term: float
    hessian_term: float
    rest: float
    correlation_hessian: float
    correlation_both: float


def distances(model: nn.Module, tokens: Tensor, labels: Tensor, seed: int, steps: Sequence[float]) -> list[Distance]:
    """Return the test with w != w* along one random unit vector u, at w = w* + t u for every t."""
    star = vector(model)
    u = torch.randn(len(star), generator=torch.Generator().manual_seed(seed), dtype=star.dtype)
    u = u / u.norm()
    here = losses(model, tokens, labels)
    slope = against_mean(gradients(model, tokens, labels) @ u)
    bend = against_mean(second_derivatives(model, tokens, labels, u))
    found = []
    for t in steps:
        change = against_mean(losses(moved(model, star + t * u), tokens, labels) - here)
        first, second = t * slope, 0.5 * t**2 * bend
        a, b, c, d = (float(x.abs().median()) for x in (change, first, second, change - first - second))
        found.append(Distance(t, a, b, c, d, correlation(change, second), correlation(change, first + second)))
    return found


def correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of two series.

    >>> correlation(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0, 3.0, 1.0]))
    -1.0
    """
    return round(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), 12)


def bound_problem(samples: int, steps: int) -> tuple[TransformerBlock, Tensor, Tensor]:
    """Return a post-norm block (gelu) that takes noise off the patches of digits, trained, with its samples.

    The bound of Theorem 7 is of a block with a squared error, so it takes a problem of that kind: 16 patches of 2 x 2, d_ff 8.
    """
    tokens = ImageSpec().data()[0][:samples]
    noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = TransformerBlock(4, 8, activation="gelu").double()
    inputs = tokens + 0.5 * noise
    for _ in updates(block, torch.optim.Adam(block.parameters(), lr=0.01), lambda: (inputs, tokens), F.mse_loss, range(steps)):
        pass
    return block, inputs, tokens


def bounded(samples: int, steps: int, t: float) -> SurfaceReport:
    """Return the repaired Theorem 7 at w = w* + t u, u a random unit vector."""
    block, inputs, targets = bound_problem(samples, steps)
    star = vector(block)
    u = torch.randn(len(star), generator=torch.Generator().manual_seed(1), dtype=star.dtype)
    point = dict(moved(block, star + t * u / u.norm()).named_parameters())
    return loss_surface_bound(block, inputs, targets, {name: p.detach() for name, p in point.items()})


def moving_average(values: Tensor, weight: float = 0.05) -> Tensor:
    """Return the exponential moving average, each new number with this weight.

    >>> moving_average(torch.tensor([1.0, 3.0]), 0.5).tolist()
    [1.0, 2.0]
    """
    average, found = float(values[0]), []
    for value in values.tolist():
        average += weight * (value - average)
        found.append(average)
    return torch.tensor(found, dtype=values.dtype)


def log_spaced(count: int, points: int = 120) -> list[int]:
    """Return whole numbers from 1 to ``count``, evenly in log scale.

    >>> log_spaced(4, 3)
    [1, 2, 4]
    """
    return sorted({round(math.exp(math.log(count) * i / (points - 1))) for i in range(points)})


def measure(
    out: Path, spec: ImageSpec, steps: int, samples: int, tested: int, iterations: int, bound_size: int
) -> dict[str, Any]:
    """Return everything that is drawn, as JSON holds it; the bound is of digits whatever the images are."""
    kept = partial(cached, out, NAME, code=MEASURED_BY)
    models = dict(snapshots(out, spec, (0, steps)))
    tokens, labels = (x[:samples] for x in spec.data())
    samples = len(tokens)
    small = replace(ImageSpec.of(spec.source, quick=True), **TINY)
    small_tokens, small_labels = (x[:samples] for x in small.data())
    small_labels = noisy(small_labels, images_of(spec.source).n_classes)
    key = {"spec": spec, "steps": steps, "samples": samples}
    tiny = small.model()
    w = kept({**key, "what": "minimum", "tiny": small, "iterations": iterations},
             lambda: converged(tiny, small_tokens, small_labels, iterations))  # fmt: skip
    minimum = moved(tiny, torch.tensor(w, dtype=torch.float64))
    cases = {
        "initial weights": (models[0], tokens, labels),
        f"after {steps} steps": (models[steps], tokens, labels),
        "L-BFGS, noisy labels": (minimum, small_tokens, small_labels),
    }
    found: dict[str, Any] = {"steps": steps, "samples": samples, "tested": tested, "gradients": {}, "test": {}, "bound": []}
    found["losses"] = {
        "trained": losses(models[steps], tokens, labels).tolist(),
        "untrained": losses(models[0], tokens, labels).tolist(),
        "uniform random numbers": Draw(0).uniform(samples).tolist(),
    }
    grid = [10 ** (e / 3) for e in range(-12, 3)]
    for name, (model, x, t) in cases.items():
        own = {**key, "point": name, "iterations": iterations}
        found["gradients"][name] = kept({**own, "what": "gradients"}, partial(gradient_norms, model, x, t))
        if name != "initial weights":
            own |= {"what": "test", "tested": tested, "grid": grid}
            found["test"][name] = kept(own, partial(distances, model, x[:tested], t[:tested], 1, grid))
    for distance in (1e-5, 1e-4, 1e-3, 1e-2):
        own = {"what": "bound", "samples": bound_size, "t": distance}
        found["bound"].append(kept(own, lambda d=distance: bounded(bound_size, 300, d).to_dict()))  # type: ignore[misc]
    return found


def averaged(values: list[float], orders: int = ORDERS) -> Tensor:
    """Return |L_{k+1} - L_k| averaged over orders of the samples, k = 1 ... n - 1."""
    return average_differences(torch.tensor(values, dtype=torch.float64), orders, Draw(0))


def protocol(axes: Axes, values: list[float]) -> None:
    """Figure 6 as the paper draws it: one order, a moving average, a line."""
    change = running_means(torch.tensor(values, dtype=torch.float64)).diff().abs()
    k = torch.arange(1, len(change) + 1, dtype=torch.float64)
    axes.loglog(k, change, ".", markersize=1.5, color="#b0b0b0", label="one sample more")
    axes.loglog(k, moving_average(change), color=METHOD_COLOURS[1], label="moving average")
    found = slope(change)
    middle = change[10:].log().mean() - found * k[10:].log().mean()
    axes.loglog(k[10:], (middle + found * k[10:].log()).exp(), "--", color=METHOD_COLOURS[0], label=f"line, slope {found:.2f}")
    heading(axes, "(a) Figure 6's protocol, trained model", "samples $k$", r"$|L_{k+1}(w^*) - L_k(w^*)|$, nats")
    axes.legend(loc="lower left")


def controls(axes: Axes, rest: Axes, data: dict[str, Any]) -> None:
    """The same averaged over orders, for the model and for what is none; and times k + 1."""
    for i, name in enumerate(POINTS):
        change = averaged(data["losses"][name])
        k = torch.arange(1, len(change) + 1, dtype=torch.float64)
        style: dict[str, Any] = {"color": METHOD_COLOURS[i + 1], "linestyle": DASHES[i], "linewidth": 1.5 - 0.2 * i}
        axes.loglog(k, change, label=f"{name}: slope {slope(change):.3f}", **style)
        rest.semilogx(k, (k + 1) * change, label=name, **style)
    heading(axes, f"(b) mean of {ORDERS} orders, and controls", "samples $k$", r"$|L_{k+1} - L_k|$")
    heading(rest, r"(c) the same times $k + 1$: the spread of the losses", "samples $k$", r"$|l_{k+1} - L_k|$")
    rest.set_ylim(0, 1.4 * rest.get_ylim()[1])  # room for the key
    axes.legend(loc="lower left")
    rest.legend(loc="upper right")


def assumption(axes: Axes, data: dict[str, Any]) -> None:
    """Figure 12: norms of the gradient at w*."""
    for i, (name, values) in enumerate(data["gradients"].items()):
        axes.loglog(range(1, len(values) + 1), values, color=METHOD_COLOURS[i + 1], linestyle=DASHES[i], label=name)
    first = max(max(values[:10]) for values in data["gradients"].values())
    k = torch.arange(1, data["samples"] + 1, dtype=torch.float64)
    axes.loglog(k, first * k.rsqrt(), color=FAINT, linewidth=0.8, label=r"$\propto 1/\sqrt{k}$")
    heading(axes, "(d) Figure 12: Assumption 1 asks for 0", "samples $k$", r"$\|\nabla L_k(w^*)\|$")
    axes.set_ylim(top=15 * axes.get_ylim()[1])  # room for the key
    axes.legend(loc="upper right", ncols=2)


SHOWN = {
    "change": "change",
    "gradient_term": "gradient's term",
    "hessian_term": "Hessian's term",
    "rest": "change minus both terms",
}


def term_panels(sizes: Axes, correlations: Axes, name: str, rows: list[dict[str, Any]], letters: str) -> None:
    """Terms and correlations against ||w - w*||."""
    t = [row["t"] for row in rows]
    for i, (what, label) in enumerate(SHOWN.items()):
        sizes.loglog(t, [row[what] for row in rows], color=METHOD_COLOURS[i], linestyle=DASHES[i], label=label)
    heading(sizes, f"({letters[0]}) {name}: terms", r"$\|w - w^*\|$", r"$(k+1)\,|\Delta|$, median over $k$, nats")
    for i, (what, label) in enumerate({"correlation_hessian": "Hessian's term alone", "correlation_both": "both terms"}.items()):
        correlations.semilogx(
            t, [row[what] for row in rows], color=METHOD_COLOURS[2 - i], linestyle=DASHES[i], marker="o", label=label
        )
    heading(correlations, f"({letters[1]}) correlation with the change", r"$\|w - w^*\|$", "correlation over $k$")
    correlations.set_ylim(-1.05, 1.05)


def bound_panels(steps: Axes, ratios: Axes, reports: list[dict[str, Any]]) -> None:
    """The repaired theorem at one distance over k, and bound over change at all."""
    shown = reports[2]
    k = [step["k"] for step in shown["steps"]]
    lines = {
        "change": [step["change"] for step in shown["steps"]],
        "bound": [step["bound"] for step in shown["steps"]],
        "its loss term": [step["loss_term"] / (step["k"] + 1) for step in shown["steps"]],
        "its gradient term": [step["gradient_term"] / (step["k"] + 1) for step in shown["steps"]],
        "its curvature term": [step["curvature_term"] / (step["k"] + 1) for step in shown["steps"]],
    }
    for i, (name, values) in enumerate(lines.items()):  # the change and the bound are each all but one of the terms
        look: dict[str, Any] = {"linewidth": 4.0, "alpha": 0.3} if i < 2 else {"linestyle": DASHES[i]}
        steps.loglog(k, values, color=METHOD_COLOURS[i], label=name, **look)
    heading(steps, rf"(c) repaired theorem, $\|w - w^*\| = {shown['distance']:.3g}$", "samples $k$", "squared error")
    for i, report in enumerate(reports):
        values = [step["bound"] / step["change"] for step in report["steps"] if step["change"]]
        ratios.loglog(
            k[: len(values)], values, color=METHOD_COLOURS[i + 1], linestyle=DASHES[i], label=f"{report['distance']:.3g}"
        )
    heading(ratios, "(f) bound / change", "samples $k$", "ratio, at least 1")


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits", run: Path | None = None) -> list[Path]:
    """Measure and draw (about 60 s of CPU); ``quick`` takes 762 parameters, 60 steps and 150 digits."""
    steps, *sizes = (60, 150, 60, 60, 12) if quick else (1000, 1437, 400, 300, 60)
    (spec, *_), (*_, steps) = classifiers("curvature-gap/cifar", (0, steps), images=images, quick=quick, run=run)
    data = measure(out, spec, steps, *sizes)
    paths, said = [], verdicts(data, spec)
    with style():
        figure = page(8.6, 6.4)
        a, b, c, d = (figure.add_subplot(2, 2, i + 1) for i in range(4))
        protocol(a, data["losses"]["trained"])
        controls(b, c, data)
        assumption(d, data)
        figure.subplots_adjust(left=0.085, right=0.985, top=0.955, bottom=0.07, wspace=0.24, hspace=0.3)
        paths.append(save(figure, out / f"{NAME}{suffix}", [said[0], said[2]]))
        figure = page(10.4, 6.4)
        axes = [figure.add_subplot(2, 3, i + 1) for i in range(6)]
        for i, (name, rows) in enumerate(data["test"].items()):
            term_panels(axes[3 * i], axes[3 * i + 1], name, rows, ("ab", "de")[i])
        bound_panels(axes[2], axes[5], data["bound"])
        for one in axes:
            one.legend(loc="best", fontsize=7)
        axes[2].set_ylim(bottom=1e-3 * axes[2].get_ylim()[0])
        axes[2].legend(loc="lower left", fontsize=7)
        axes[5].set_ylim(top=1e3 * axes[5].get_ylim()[1])
        axes[5].legend(loc="upper center", ncol=2, fontsize=7, title=r"$\|w - w^*\|$", title_fontsize=7)
        figure.subplots_adjust(left=0.07, right=0.985, top=0.955, bottom=0.07, wspace=0.3, hspace=0.3)
        paths.append(save(figure, out / f"{NAME}_test{suffix}", said[1:2]))
    return [*paths, *numbers(out, data), write_verdicts(out, NAME, said)]


def verdicts(data: dict[str, Any], spec: ImageSpec) -> list[Verdict]:
    """Return what the protocol and the test show of Figures 6 and 12."""
    slopes = {name: slope(averaged(data["losses"][name])) for name in POINTS}
    trained, controls = slopes[POINTS[0]], [slopes[name] for name in POINTS[1:]]
    seen = f"{trained:.3f} trained; controls {controls[0]:.3f} untrained, {controls[1]:.3f} random numbers"
    best = {name: max(rows, key=lambda row: row["correlation_hessian"]) for name, rows in data["test"].items()}
    alone = ", ".join(f"{row['correlation_hessian']:.2f} at distance {row['t']:.2g}" for row in best.values())
    fig6 = (in_every(f"slope within 0.05 of -1, mean of {ORDERS} orders", [abs(trained + 1) < 0.05], f"{trained:.3f}"),)
    evidence = (
        in_every("the slope differs from both controls by more than 0.05", (abs(trained - x) > 0.05 for x in controls), seen),
        in_every(
            "at some w the Hessian's term alone has a correlation above 0.9 with the change",
            (row["correlation_hessian"] > 0.9 for row in best.values()),
            f"at most {alone}",
        ),
    )
    norms = [values for name, values in data["gradients"].items() if name != "initial weights"]
    tenth = data["samples"] // 10 - 1
    fig12 = in_every(
        "the gradient at w* over all samples is less than half of that over a tenth of them",
        (one[-1] < one[tenth] / 2 for one in norms),
        ", ".join(f"{one[tenth]:.2g} to {one[-1]:.2g}" for one in norms),
    )
    scale = scale_of_images(spec, 1, data["steps"], data["samples"])
    return [
        Verdict("curvature-gap/fig6-slope", "the change of the loss falls as 1/k", scale, fig6),
        Verdict("curvature-gap/fig6-evidence", "the slope tells Theorem 7 from controls without a model", scale, evidence),
        Verdict("curvature-gap/fig12", "the gradient at w* falls with the number of samples", scale, (fig12,)),
    ]


def numbers(out: Path, data: dict[str, Any]) -> list[Path]:
    """Write what is drawn, the slopes and the medians."""
    change = {name: averaged(values) for name, values in data["losses"].items()}
    rows = [
        {"k": k, **{name: float(x[k - 1]) for name, x in change.items()},
         **{f"gradient norm, {name}": float(x[k - 1]) for name, x in data["gradients"].items()}}
        for k in log_spaced(data["samples"] - 1)
    ]  # fmt: skip
    test = [{"point": name, **row} for name, found in data["test"].items() for row in found]
    medians = []
    for report in data["bound"]:
        ratio = torch.tensor([step["bound"] / step["change"] for step in report["steps"] if step["change"]])
        kept = {name: report[name] for name in ("distance", "curvature", "gradient_norm")}
        medians.append({**kept, "median_bound_over_change": float(ratio.median()), "smallest": float(ratio.min())})
    slopes = {name: slope(x) for name, x in change.items()}
    summary = {"slopes": slopes, "bound": medians, **{name: data[name] for name in ("steps", "samples", "tested")}}
    return [
        write_rows(out / f"{NAME}.csv", rows),
        write_rows(out / f"{NAME}_test.csv", test),
        write_json(out / f"{NAME}.json", summary),
    ]
