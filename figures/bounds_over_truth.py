"""Bound over truth: how far each bound on a Hessian's norm lies above it, by problem, size, training and norm placement.

Self-attention alone and the post-norm block of Closing the Curvature Gap (one head, relu, LayerNorm without gain and eps), mean
squared error of one sequence, at three points: *init*, weights N(0, 1/d_in), input and target N(0, 1); *large*, three times
these weights and a target that is the output plus a tenth of noise; *trained*, after 400 steps of Adam (lr 0.01) on six
sequences of a noisy teacher, each sequence's Hessian by itself. The sizes (L, d, d_K and d_ff) take turns: attention (4, 4, 2),
(6, 6, 4), (5, 3, 2); block (4, 4, 2, 6), (5, 6, 3, 8), (6, 4, 2, 4).

The bounds are those of ``hessiankit.bounds`` and the printed ones; docs/bounds.md defines each. Medians over the problems, and
the worst in brackets. The certified ones are all of the same matrix, so they differ by method alone.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

import hessiankit as hk
from figures._kit import FAINT, INK, MACHINE, METHOD_COLOURS, heading, page, save, style, write_json
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.curvature.plot_frame import Picture
from hessiankit.request.read import read_request
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar
from hessiankit.support.tables import as_markdown, as_text, table
from hessiankit.theory.bounding.a_priori import a_priori
from hessiankit.theory.bounding.bounds import LossAt, UndefinedBound
from hessiankit.theory.bounding.certified import certify, schatten_upper
from hessiankit.theory.bounding.structured import structured
from papers.curvature_gap.printed_bounds import PRINTED
from papers.experiments.store import put

NAME = Path(__file__).stem
MODULES = ("attention", "block")
POINTS = ("init", "large", "trained")
SIZES = {"attention": ((4, 4, 2), (6, 6, 4), (5, 3, 2)), "block": ((4, 4, 2, 6), (5, 6, 3, 8), (6, 4, 2, 4))}
SAMPLES = 6
"""Sequences that a model is trained on."""
Module: TypeAlias = Attention | TransformerBlock
Ratios: TypeAlias = dict[str, float]
"""Kind of bound -> bound / norm."""


@dataclass(frozen=True)
class Settings:
    """How much is measured: problems a column, steps of training, widths and placements with the number of seeds of each."""

    problems: int = 150
    checkpoints: tuple[int, ...] = (0, 10, 100, 400)
    widths: tuple[int, ...] = (4, 8, 16)
    width_seeds: int = 4
    placements: tuple[str, ...] = (
        "post", "pre", "post-pre", "pre-post", "hybridnorm", "qkvc-post", "sandwich", "olmo2", "lns", "layerscale", "admin",
        "deepnorm",
    )  # fmt: skip
    placement_seeds: int = 8


FULL = Settings()
QUICK = Settings(6, (0, 2), (3, 4), 1, ("post", "hybridnorm"), 1)


def normal(*shape: int, seed: int) -> Tensor:
    """Return a standard normal draw of its own seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(kind: str, sizes: tuple[int, ...], seed: int) -> Module:
    """Return a module of the paper: an attention of (L, d, d_K), or a block of (L, d, d_K, d_ff)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "attention":
            return Attention(sizes[1], d_k=sizes[2]).double()
        return TransformerBlock(sizes[1], sizes[3], d_k=sizes[2], affine=False, eps=0.0).double()


def ratios(module: Module, x: Tensor, t: Tensor) -> Ratios:
    """Return bound / norm for every kind of bound on the whole Hessian."""
    found = hk.hessian(module, x.unsqueeze(0), t.unsqueeze(0))
    H = found.matrix
    true = float(torch.linalg.eigvalsh(H).abs().max())
    at = LossAt(module, x.unsqueeze(0), t.unsqueeze(0), "mse")
    limits: Ratios = {}
    for one in PRINTED.values():
        with contextlib.suppress(UndefinedBound):
            limits[one.title], _ = one.norms(at)
    limits |= {"a priori": a_priori(module, x, t).whole}
    limits |= {"structured": structured(read_request(module, at.x, at.t).only()).whole}
    certified = {**certify(H, found.slices).bounds, "schatten": schatten_upper(H)}
    limits |= {f"certified, {way}": value for way, value in certified.items() if value is not None}
    return {kind: limit / true for kind, limit in limits.items()}


def problem(kind: str, point: str, seed: int) -> tuple[Module, Tensor, Tensor]:
    """Return a problem of the points "init" and "large"."""
    sizes = SIZES[kind][seed % 3]
    module, x = make(kind, sizes, seed), normal(sizes[0], sizes[1], seed=seed + 10_000)
    t = normal(sizes[0], sizes[1], seed=seed + 20_000)
    if point == "large":
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(3.0)
            out = module(x)
            t = out + 0.1 * out.std() * t
    return module, x, t


def trained(kind: str, seed: int, checkpoints: tuple[int, ...]) -> Iterator[tuple[int, Module, Tensor, Tensor]]:
    """Yield (step, module, inputs, targets) along the training of one model."""
    sizes = SIZES[kind][seed % 3]
    student, teacher = make(kind, sizes, seed), make(kind, sizes, seed + 30_000)
    x, noise = normal(SAMPLES, *sizes[:2], seed=seed + 10_000), normal(SAMPLES, *sizes[:2], seed=seed + 20_000)
    with torch.no_grad():
        t = teacher(x)
        t = t + 0.1 * t.std() * noise
    adam = torch.optim.Adam(student.parameters(), lr=0.01)
    for step in range(checkpoints[-1] + 1):
        if step in checkpoints:
            yield step, student, x, t
        adam.zero_grad()
        ((student(x) - t) ** 2).mean().backward()
        adam.step()


Measured: TypeAlias = dict[str, dict[str, list[Ratios]]]
"""Panel -> what varies there -> the problems' ratios."""


def measure(settings: Settings) -> Measured:
    """Return every ratio: panels "attention", "block", "training", "size" and "placement"."""
    jobs = list(_jobs(settings))
    found: Measured = {}
    with progress_bar() as tell:
        for k, (name, job) in enumerate(jobs):
            tell(name, k, len(jobs))
            for panel, key, one in job():
                found.setdefault(panel, {}).setdefault(key, []).append(one)
    return found


def _jobs(settings: Settings) -> Iterator[tuple[str, Any]]:
    for kind in MODULES:
        for seed in range(settings.problems):
            for point in POINTS[:2]:
                yield f"{kind}, {point}", lambda k=kind, p=point, s=seed: [(k, p, ratios(*problem(k, p, s)))]
        for seed in range(-(-settings.problems // SAMPLES)):
            yield f"{kind}, trained", lambda k=kind, s=seed: _along_training(k, s, settings.checkpoints)
        for width in settings.widths:
            for seed in range(settings.width_seeds):
                yield f"{kind}, d = {width}", lambda k=kind, w=width, s=seed: [("size", f"{k} {w}", _at_width(k, w, s))]
    for placement in settings.placements:
        for seed in range(settings.placement_seeds):
            yield placement, lambda p=placement, s=seed: [("placement", p, _at_placement(p, s))]


def _along_training(kind: str, seed: int, checkpoints: tuple[int, ...]) -> Iterator[tuple[str, str, Ratios]]:
    for step, module, x, t in trained(kind, seed, checkpoints):
        last = step == checkpoints[-1]
        for b in range(SAMPLES if last else 2):
            one = ratios(module, x[b], t[b])
            yield "training", f"{kind} {step}", one
            if last:
                yield kind, "trained", one


def _at_width(kind: str, width: int, seed: int) -> Ratios:
    sizes = (width, width, max(width // 2, 1), width)
    return ratios(make(kind, sizes, seed), normal(width, width, seed=seed + 10_000), normal(width, width, seed=seed + 20_000))


def _at_placement(placement: str, seed: int) -> Ratios:
    """Norms with gain, bias and eps = 1e-5, in the second block of four."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = TransformerBlock(4, 6, placement=placement, layer=2, n_layers=4).double()
    return ratios(block, normal(4, 4, seed=seed + 10_000), normal(4, 4, seed=seed + 20_000))


Columns: TypeAlias = dict[str, dict[str, tuple[float, float]]]
"""What varies -> kind of bound -> (median, worst)."""
Summary: TypeAlias = dict[str, Columns]
"""Panel -> its columns."""


def summarise(measured: Measured) -> Summary:
    """Return medians and worst ratios; a kind that some problem lacks counts those that have it."""
    found: Summary = {}
    for panel, columns in measured.items():
        for key, problems in columns.items():
            kinds = dict.fromkeys(kind for one in problems for kind in one)
            values = {kind: [one[kind] for one in problems if kind in one] for kind in kinds}
            found.setdefault(panel, {})[key] = {kind: (statistics.median(v), max(v)) for kind, v in values.items()}
    return found


def shown(pair: tuple[float, float] | None) -> str:
    """Return "median (worst)".

    >>> shown((2.345, 71234.0)), shown(None)
    ('2.35 (7.12e+04)', '')
    """
    return "" if pair is None else f"{pair[0]:.3g} ({pair[1]:.3g})"


def tables(summary: Summary) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (title, headers, rows): kinds down for the two modules, and the others with the bounds across."""
    for panel in MODULES:
        columns = summary[panel]
        kinds = dict.fromkeys(kind for column in columns.values() for kind in column)
        points = [point for point in POINTS if point in columns]
        yield panel, [panel, *points], [[kind, *(shown(columns[p].get(kind)) for p in points)] for kind in kinds]
    for panel in ("size", "training", "placement"):
        kinds = {"a priori": "", "structured": "", "certified, norm matrix": "", "certified, cholesky": ""}
        rows = [[key, *(shown(column.get(kind)) for kind in kinds)] for key, column in summary[panel].items()]
        yield panel, [panel, *kinds], rows


AS_PRINTED = ("printed theorem 1", "printed theorem 6")
"""Kinds that are drawn as "as printed", of the attention and of the block: they may be exceeded (``curvature_gap_theorem_1``)."""
COLOURS = {
    "as printed": METHOD_COLOURS[4], "a priori": METHOD_COLOURS[2], "structured": METHOD_COLOURS[1],
    "certified, norm matrix": METHOD_COLOURS[3],
}  # fmt: skip
DRAWN = tuple(COLOURS)
MARKS = {"as printed": "X", "a priori": "o", "structured": "s", "certified, norm matrix": "^"}
DASHES: dict[str, Any] = {"attention": "--", "block": "-"}


def drawn(columns: Columns) -> Columns:
    """Return the kinds that are drawn, under their names in the picture.

    >>> drawn({"init": {"printed theorem 6": (3.0, 4.0), "a priori": (1.0, 2.0), "certified, schatten": (1.0, 1.0)}})
    {'init': {'as printed': (3.0, 4.0), 'a priori': (1.0, 2.0)}}
    """
    named = {
        key: {("as printed" if kind in AS_PRINTED else kind): pair for kind, pair in one.items()} for key, one in columns.items()
    }
    return {key: {kind: pair for kind, pair in one.items() if kind in DRAWN} for key, one in named.items()}


def draw_chart(whole: Summary, path: Path) -> Path:
    """Draw five panels of medians, with a thin line up to the worst of each, in log scale, and return the path."""
    summary = {panel: drawn(columns) for panel, columns in whole.items()}
    with style():
        figure = page(8.6, 6.4)
        grid = figure.add_gridspec(2, 3, left=0.075, right=0.985, top=0.865, bottom=0.12, wspace=0.25, hspace=0.34)
        title = "Bound over spectral norm of the Hessian; as printed: Theorems 1 (attention) and 6 (block), which can be exceeded"
        figure.text(0.075, 0.965, title, fontsize=9.5, color=INK)
        _legend(figure)
        for k, panel in enumerate(("attention", "block")):
            axes = figure.add_subplot(grid[0, k])
            _points(axes, summary[panel], DRAWN)
            _dress(axes, {"attention": "self-attention", "block": "post-norm block"}[panel], labelled=k == 0)
        axes = figure.add_subplot(grid[0, 2])
        _lines(axes, summary["size"])
        _dress(axes, "by width d = L, at initialisation", x="width")
        axes = figure.add_subplot(grid[1, 0])
        _lines(axes, summary["training"])
        _dress(axes, "by steps of training", labelled=True, x="step")
        axes = figure.add_subplot(grid[1, 1:])
        _points(axes, summary["placement"], DRAWN)
        axes.tick_params(axis="x", labelrotation=35)
        _dress(axes, "by norm placement, at initialisation")
        return save(figure, path)


def _legend(figure: Picture) -> None:
    kinds = [Line2D([], [], color=COLOURS[kind], marker=MARKS[kind], linestyle="", label=kind.split(", ")[-1]) for kind in DRAWN]
    modules = [Line2D([], [], color=FAINT, linestyle=dash, label=module) for module, dash in DASHES.items()]
    figure.legend(handles=kinds, loc="upper left", bbox_to_anchor=(0.06, 0.952), ncols=4)
    figure.legend(handles=modules, loc="upper left", bbox_to_anchor=(0.55, 0.952), ncols=2)
    figure.text(0.985, 0.925, "mark: median; line: worst", fontsize=8, color=FAINT, ha="right")


def _points(axes: Axes, columns: Columns, kinds: tuple[str, ...]) -> None:
    """Medians of every column beside each other, each with a line to its worst."""
    for k, kind in enumerate(kinds):
        for at, column in enumerate(columns.values()):
            if kind not in column:
                continue
            median, worst = column[kind]
            x = at + 0.21 * (k - (len(kinds) - 1) / 2)
            axes.plot([x, x], [median, worst], color=COLOURS[kind], linewidth=1.0, alpha=0.6)
            axes.plot([x], [median], MARKS[kind], color=COLOURS[kind], markersize=4)
            if kind == "certified, norm matrix" and len(columns) > 6:
                continue  # no room for one more number
            axes.annotate(_short(median), (x, median), (0, -9), textcoords="offset points", ha="center", fontsize=6, color=FAINT)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_xlim(-0.6, len(columns) - 0.4)


def _short(value: float) -> str:
    """Return two significant digits, written out up to ten thousand."""
    return f"{value:.2g}".replace("e+", "e") if value < 100 or value >= 1e4 else f"{float(f'{value:.2g}'):,.0f}"


def _lines(axes: Axes, columns: Columns) -> None:
    """Medians against the number that a column's name ends with, a line for each module and kind."""
    numbers = sorted({int(name.split()[1]) for name in columns})
    for module, dash in DASHES.items():
        for kind in DRAWN:
            own = {int(n.split()[1]): c[kind][0] for n, c in columns.items() if n.split()[0] == module and kind in c}
            found = [(k, own[number]) for k, number in enumerate(numbers) if number in own]
            if not found:
                continue
            axes.plot(*zip(*found, strict=True), dash, marker=MARKS[kind], color=COLOURS[kind], markersize=4, linewidth=1.0)
    axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])


def _dress(axes: Axes, title: str, *, labelled: bool = False, x: str = "") -> None:
    heading(axes, title, x, "bound / norm" if labelled else "")
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(axes.get_ylim()[1] ** -0.12, 0.5))  # room for the numbers below 1
    axes.axhline(1.0, color=INK, linewidth=0.6)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure, print the tables, write JSON and Markdown, and draw; ``quick`` takes six problems a column."""
    settings = QUICK if quick else FULL
    measured = measure(settings)
    summary = summarise(measured)
    texts = []
    for title, headers, rows in tables(summary):
        print(as_text(table(headers, rows, title=f"bound / norm, median (worst): {title}")))
        texts.append(as_markdown(headers, rows) + "\n")
    data = {"environment": environment(*MACHINE), "settings": asdict(settings), "summary": summary, "ratios": measured}
    text = put(out / f"{NAME}.md", "\n".join(texts).encode())
    return [draw_chart(summary, out / f"{NAME}{suffix}"), write_json(out / f"{NAME}.json", data), text]
