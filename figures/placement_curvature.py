"""Norm placement and curvature: spectral norms of the Hessian's blocks by placement, depth and initialisation.

A causal language model on the bytes of the Zen of Python (Python's standard library, ``this.py``), cross entropy, at
initialisation: d_model 32, four heads, SwiGLU of width 64, RMSNorm, rotary positions, the head tied to the embedding, four
sequences of 16 tokens, float64. For each placement the exact Hessian's diagonal blocks of the block types QK, VO, FFN, Norm and
Emb (:func:`hessiankit.block_types`) and the whole, at one block and at eight, for two initialisations and three seeds: the
eigenvalue of largest magnitude by Lanczos until its residual is below 1/1000 of it.

HybridNorm (arXiv 2503.04598) trains these placements and has no Hessian; of its Table 4 all sixteen are here. With all of q, k
and v normalised by an RMSNorm of gain 1, a norm in front of them changes nothing but what eps does, so that three pairs of
placements have to agree: pre-qkv-post and hybridnorm, pre-qkv-pre and qkv-pre, hybridnorm* and first-qkv-pre. The output says
how far they do, with the usual eps of 1e-5 and with 1e-14.

Finished cells are kept: an interrupted run goes on where it was.
"""

from __future__ import annotations

import codecs
import statistics
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

import hessiankit as hk
from figures._kit import (
    FAINT,
    INK,
    MACHINE,
    TYPE_COLOURS,
    TYPE_MARKS,
    cached,
    each,
    heading,
    page,
    save,
    style,
    write_json,
    write_rows,
)  # fmt: skip
from figures._lanczos import extremes
from figures._verdicts import Verdict, in_every
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar
from hessiankit.support.tables import as_markdown, as_text, table
from papers.experiments.spec import scale
from papers.experiments.store import put

NAME = Path(__file__).stem
GROUPS = ("QK", "VO", "FFN", "Norm", "Emb", "all")
FAMILIES = {
    "the residual is normalised in each block": (
        "post", "deepnorm", "post-pre", "pre-post", "hybridnorm", "pre-qkv-post", "hybridnorm*", "first-qkv-pre", "qkvc-post",
        "qkc-post", "qk-post", "kv-post", "kc-post",
    ),
    "in some blocks, or the branches are scaled": ("mix-ln", "lns", "layerscale", "skipinit"),
    "never": ("pre", "pre-qk-pre", "qkv-pre", "pre-qkv-pre", "sandwich", "olmo2"),
}  # fmt: skip
EQUAL = (("pre-qkv-post", "hybridnorm"), ("pre-qkv-pre", "qkv-pre"), ("hybridnorm*", "first-qkv-pre"))
EPS, TINY = 1e-5, 1e-14


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and the data, and the values that vary."""

    families: dict[str, tuple[str, ...]]
    initialisations: tuple[str, ...] = ("normal", "megatron")
    depths: tuple[int, int] = (1, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    d_model: int = 32
    d_ff: int = 64
    n_heads: int = 4
    tokens: int = 16
    sequences: int = 4
    tol: float = 1e-3

    @property
    def placements(self) -> tuple[str, ...]:
        """All placements, family by family."""
        return tuple(name for family in self.families.values() for name in family)


FULL = Settings(FAMILIES)
QUICK = Settings(
    {"residual": ("post", "hybridnorm", "pre-qkv-post"), "never": ("pre",)},
    ("megatron",), (1, 2), (0, 1), d_model=8, d_ff=8, n_heads=2, tokens=6, sequences=2,
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One model: its placement, initialisation, number of blocks, seed, and eps."""

    placement: str
    initialisation: str
    blocks: int
    seed: int
    eps: float = EPS


@dataclass(frozen=True)
class Measured:
    """What was found of a cell: norms and relative residuals by block type, and the loss."""

    cell: Cell
    norms: dict[str, float]
    signs: dict[str, int]
    residuals: dict[str, float]
    products: int
    loss: float


def zen() -> bytes:
    """Return the Zen of Python, the same in every version of Python 3, without importing ``this``, which prints it.

    >>> zen()[:30]
    b'The Zen of Python, by Tim Pete'
    """
    source = Path(sysconfig.get_paths()["stdlib"], "this.py").read_text(encoding="ascii")
    return codecs.decode(source.split('"""')[1], "rot13").encode("ascii")


def data(settings: Settings) -> tuple[Tensor, Tensor]:
    """Return token ids and next tokens (sequences, tokens), from places spread over the text."""
    text, n = zen(), settings.tokens + 1
    starts = [k * (len(text) - n) // settings.sequences for k in range(settings.sequences)]
    ids = torch.tensor([list(text[start : start + n]) for start in starts])
    return ids[:, :-1], ids[:, 1:]


def model_of(cell: Cell, settings: Settings) -> hk.Transformer:
    """Return the language model of a cell, in float64; 128 token ids are ASCII."""
    return hk.Transformer(
        128, settings.d_model, settings.d_ff, cell.blocks, settings.n_heads, cell.placement, norm="rmsnorm", activation="swiglu",
        causal=True, rotary=True, eps=cell.eps, initialisation=cell.initialisation, seed=cell.seed,
    ).double()  # fmt: skip


def measure(cell: Cell, settings: Settings) -> Measured:
    """Return the spectral norms of a cell's Hessian: one linearisation, one block product a step for all of them."""
    model = model_of(cell, settings)
    operator = hk.hessian_operator(model, *data(settings), loss="cross_entropy")
    types = hk.block_types(model)
    groups: dict[str, Tensor] = {}
    for group in GROUPS:
        where = [s for name, s in operator.slices.items() if group in (types[name], "all")]
        groups[group] = torch.cat([torch.arange(s.start, s.stop) for s in where])
    found = extremes(operator.__matmul__, operator.shape[0], groups, tol=settings.tol, seed=cell.seed)
    return Measured(
        cell,
        {name: abs(one.value) for name, one in found.items()},
        {name: 1 if one.value > 0 else -1 for name, one in found.items()},
        {name: one.residual / abs(one.value) for name, one in found.items()},
        sum(one.products for one in found.values()),
        float(operator.loss),
    )


def cells(settings: Settings) -> list[Cell]:
    """Return every cell: those of the picture, then those of the equal pairs with hardly any eps."""
    several = [
        Cell(placement, initialisation, blocks, seed)
        for placement in settings.placements
        for initialisation in settings.initialisations
        for blocks in settings.depths
        for seed in settings.seeds
    ]
    tiny = [
        replace(Cell(name, settings.initialisations[-1], blocks, settings.seeds[0]), eps=TINY)
        for pair in equal_pairs(settings)
        for name in pair
        for blocks in settings.depths
    ]
    return several + tiny


def equal_pairs(settings: Settings) -> list[tuple[str, str]]:
    """Return the pairs of placements that have to agree, as far as both are measured."""
    return [pair for pair in EQUAL if set(pair) <= set(settings.placements)]


def measure_all(out: Path, settings: Settings) -> list[Measured]:
    """Measure every cell that is not kept, and keep each when it is finished."""
    varied = ("families", "initialisations", "depths", "seeds")
    sizes = {name: value for name, value in asdict(settings).items() if name not in varied}
    todo, found = cells(settings), []
    with progress_bar() as tell:
        for k, cell in enumerate(todo):
            tell(f"{cell.placement}, {cell.blocks} blocks", k, len(todo))
            answer: Any = cached(out, NAME, {"cell": cell, **sizes}, partial(measure, cell, settings))
            found.append(Measured(**{**answer, "cell": cell}))
    return found


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise the values of the seeds."""
        return cls(statistics.median(values), min(values), max(values))


Summary = dict[tuple[str, str, str, str], Spread]
"""(placement, initialisation, blocks or "growth", block type) -> its seeds."""


def summarise(measured: list[Measured], settings: Settings) -> Summary:
    """Return norms at both depths and the growth from the smaller to the larger, seed by seed, over the seeds."""
    norms = {m.cell: m.norms for m in measured}
    shallow, deep = settings.depths
    found: Summary = {}
    for placement in settings.placements:
        for initialisation in settings.initialisations:
            for group in GROUPS:
                at = {
                    blocks: [norms[Cell(placement, initialisation, blocks, seed)][group] for seed in settings.seeds]
                    for blocks in settings.depths
                }
                for blocks, values in at.items():
                    found[placement, initialisation, str(blocks), group] = Spread.of(values)
                growth = [b / a for a, b in zip(at[shallow], at[deep], strict=True)]
                found[placement, initialisation, "growth", group] = Spread.of(growth)
    return found


def equalities(measured: list[Measured], settings: Settings) -> list[tuple[str, ...]]:
    """Return, for the pairs that have to agree, the largest relative difference of the norms that both have, by eps."""
    norms = {m.cell: m.norms for m in measured}
    rows = []
    for pair in equal_pairs(settings):
        for blocks in settings.depths:
            texts = []
            for eps in (EPS, TINY):
                a, b = (norms[Cell(name, settings.initialisations[-1], blocks, settings.seeds[0], eps)] for name in pair)
                worst = max(("QK", "VO", "FFN", "Emb"), key=lambda g: abs(a[g] / b[g] - 1))
                texts.append(f"{abs(a[worst] / b[worst] - 1):.1e} ({worst})")
            rows.append((" = ".join(pair), str(blocks), *texts))
    return rows


def shown(value: float) -> str:
    """Return three significant digits.

    >>> [shown(value) for value in (0.0123456, 7.746, 105.39, 1234.5)]
    ['0.0123', '7.75', '105', '1234']
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def tables(found: Summary, settings: Settings) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (initialisation, headers, rows): norms at both depths of every block type, and the whole's growth with its range."""
    shallow, deep = map(str, settings.depths)
    headers = ["placement", *(f"{group} {shallow} -> {deep}" for group in GROUPS), "growth of all", "of the seeds"]
    for initialisation in settings.initialisations:
        rows = []
        for placement in settings.placements:
            at = {blocks: [found[placement, initialisation, blocks, g] for g in GROUPS] for blocks in (shallow, deep)}
            pairs = [f"{shown(a.median)} -> {shown(b.median)}" for a, b in zip(at[shallow], at[deep], strict=True)]
            growth = found[placement, initialisation, "growth", "all"]
            rows.append([placement, *pairs, f"{growth.median:.2g}", f"{growth.low:.2g} to {growth.high:.2g}"])
        yield initialisation, headers, rows


def claimed(measured: list[Measured], settings: Settings) -> Verdict:
    """Return whether a norm on the residual in every block keeps the growth below that of the placements that never have one."""
    whole = {m.cell: m.norms["all"] for m in measured}
    shallow, deep = settings.depths
    always, *_, never = settings.families.values()
    parts = []
    for initialisation in settings.initialisations:

        def grown(names: tuple[str, ...], seed: int, init: str = initialisation) -> list[float]:
            return [whole[Cell(name, init, deep, seed)] / whole[Cell(name, init, shallow, seed)] for name in names]

        most, least = ([pick(grown(names, seed)) for seed in settings.seeds] for pick, names in ((max, always), (min, never)))
        parts.append(
            in_every(
                f"{initialisation} initialisation: every placement that normalises the residual in each block grows less than "
                "every one that never does",
                (a < b for a, b in zip(most, least, strict=True)),
                f"by seed at most {each(most)} times against at least {each(least)}",
            )
        )
    parameters = sum(p.numel() for p in model_of(Cell("pre", settings.initialisations[0], deep, 0), settings).parameters())
    data = f"{settings.sequences} sequences of {settings.tokens} bytes, initial weights"
    words = "a norm on the residual in every block keeps the growth below that of placements without one"
    return Verdict("", words, scale(len(settings.seeds), deep, settings.d_model, parameters, data), tuple(parts))


ROW = 0.2
"""Inches of a placement."""


def draw_growth(found: Summary, settings: Settings, said: Verdict, path: Path) -> Path:
    """Draw growth with depth, a row a placement and a panel an initialisation, and return the path."""
    shallow, deep = settings.depths
    count, panels = len(settings.placements) + len(settings.families), max(2, len(settings.initialisations))
    width, height = 1.4 + 3.6 * panels, ROW * count + 1.3
    with style():
        figure = page(width, height)
        for k, initialisation in enumerate(settings.initialisations):
            place = ((1.3 + 3.6 * k) / width, 0.5 / height, 2.75 / width, ROW * count / height)
            axes = figure.add_axes(place, xscale="log")
            _growth(axes, {key[0::3]: one for key, one in found.items() if key[1:3] == (initialisation, "growth")}, settings)
            heading(axes, f"{initialisation} initialisation", f"norm at {deep} blocks over norm at {shallow}")
            axes.set_ylim(count - 0.5, -0.5)
            axes.tick_params(labelleft=k == 0)
        title = f"Growth of the Hessian's spectral norm from {shallow} to {deep} blocks, by norm placement"
        figure.text(0.1 / width, 1 - 0.2 / height, title, fontsize=10)
        legend = figure.axes[0].get_legend_handles_labels()
        figure.legend(*legend, loc="upper left", bbox_to_anchor=(0, 1 - 0.23 / height), ncols=5)
        return save(figure, path, [said])


def _growth(axes: Axes, growth: Mapping[tuple[str, str], Spread], settings: Settings) -> None:
    """Medians of the seeds by block type; of the whole matrix with the range of the seeds, and in numbers at the right."""
    rows: dict[str, int] = {}
    for k, (family, names) in enumerate(settings.families.items()):
        axes.text(0.01, len(rows) + k, family, transform=axes.get_yaxis_transform(), va="center", fontsize=7, style="italic")
        rows |= {name: len(rows) + k + 1 + j for j, name in enumerate(names)}
    at, whole = list(rows.values()), {name: growth[name, "all"] for name in rows}
    for group in ("QK", "FFN", "VO"):
        look: Any = {"marker": TYPE_MARKS[group], "color": TYPE_COLOURS[group], "markersize": 3, "linestyle": ""}
        axes.plot([growth[name, group].median for name in rows], at, label=f"block {group}", **look)
    lows, highs = [one.low for one in whole.values()], [one.high for one in whole.values()]
    axes.hlines(at, lows, highs, color=INK, linewidth=1.4, label="range of the seeds")
    axes.plot([one.median for one in whole.values()], at, "o", color=INK, markersize=5, label="whole Hessian, median")
    for name, one in whole.items():
        text = f"{one.median:.2g} [{one.low:.2g}, {one.high:.2g}]"
        axes.text(1.01, rows[name], text, transform=axes.get_yaxis_transform(), va="center", fontsize=6.5, color=FAINT)
    axes.axvline(1.0, color=FAINT, linewidth=0.8)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(at, list(rows))


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure, print the tables and the check of the equal pairs, write CSV, JSON and Markdown, and draw the growth.

    ``quick`` takes four placements, d_model 8, one and two blocks, one initialisation and two seeds: seconds.
    """
    settings = QUICK if quick else FULL
    measured = measure_all(out, settings)
    found = summarise(measured, settings)
    texts = []
    for initialisation, headers, rows in tables(found, settings):
        print(as_text(table(headers, rows, title=f"spectral norms, {initialisation} initialisation, medians of the seeds")))
        texts.append(f"### {initialisation.capitalize()} initialisation\n\n{as_markdown(headers, rows)}\n")
    checked = ["equal but for eps", "blocks", f"difference, eps {EPS:g}", f"eps {TINY:g}"], equalities(measured, settings)
    print(as_text(table(*checked)))
    worst = max(max(m.residuals.values()) for m in measured)
    print(f"  largest residual {worst:.1e} of its eigenvalue; {sum(m.products for m in measured)} products")
    said = claimed(measured, settings)
    print(f"  {said.status}: {said.text}")
    text = put(out / f"{NAME}.md", "\n".join([*texts, as_markdown(*checked), ""]).encode())
    data = {"environment": environment(*MACHINE), "settings": asdict(settings), "cells": measured}
    header = ("placement", "initialisation", "blocks", "block type", "median", "lowest", "highest")
    spreads = [dict(zip(header, (*key, *asdict(spread).values()), strict=True)) for key, spread in found.items()]
    return [
        draw_growth(found, settings, said, out / f"{NAME}{suffix}"), write_rows(out / f"{NAME}.csv", spreads),
        write_json(out / f"{NAME}.json", data), text,
    ]  # fmt: skip
