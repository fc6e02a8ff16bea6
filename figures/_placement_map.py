"""The map of spectral norms: placements down, block types across, at both depths, with their growth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm

from figures._kit import FAINT, INK, page, save
from hessiankit.curvature.plot_frame import STYLE


class Median(Protocol):
    """Whatever has a median."""

    @property
    def median(self) -> float:
        """The number drawn."""


class Varied(Protocol):
    """What the map needs to know of the settings."""

    @property
    def families(self) -> Mapping[str, tuple[str, ...]]:
        """Placements by family."""

    @property
    def initialisations(self) -> tuple[str, ...]:
        """One panel each."""

    @property
    def depths(self) -> tuple[int, int]:
        """Numbers of blocks."""


GROUPS = ("QK", "VO", "FFN", "Norm", "Emb", "all")
CELL, ROW = 0.44, 0.22  # inches
MOST = 30.0
"""End of the colour scale of the growth; more has the same colour, and its number."""


def draw_map(found: Mapping[tuple[str, str, str, str], Median], settings: Varied, path: Path) -> Path:
    """Draw medians as coloured cells with their numbers, one panel an initialisation, and return the path."""
    placements = [name for family in settings.families.values() for name in family]
    parts = (*map(str, settings.depths), "growth")
    panels = {
        init: {part: np.array([[found[p, init, part, g].median for g in GROUPS] for p in placements]) for part in parts}
        for init in settings.initialisations
    }
    norms = np.concatenate([panel[part].ravel() for panel in panels.values() for part in parts[:2]])
    growth = min(MOST, max(float(np.exp(np.abs(np.log(panel["growth"])).max())) for panel in panels.values()))
    scales = {part: ScalarMappable(LogNorm(norms.min(), norms.max()), "viridis") for part in parts[:2]}
    scales["growth"] = ScalarMappable(LogNorm(1 / growth, growth), "RdBu_r")

    left, right, top, between, gap = 1.35, 0.5, 0.62, 0.75, 0.16
    width = left + 3 * CELL * len(GROUPS) + 2 * gap + right
    panel_height = ROW * len(placements)
    height = top + len(panels) * (panel_height + between) - between + 0.15
    with mpl.rc_context(STYLE):
        figure = page(width, height)
        figure.text(
            left / width, 1 - 0.2 / height, "Spectral norms of the Hessian's diagonal blocks at initialisation", fontsize=10
        )
        for row, (init, panel) in enumerate(panels.items()):
            bottom = height - top - (row + 1) * panel_height - row * between
            for column, part in enumerate(parts):
                x = left + column * (CELL * len(GROUPS) + gap)
                place = (x / width, bottom / height, CELL * len(GROUPS) / width, panel_height / height)
                axes = figure.add_axes(place)
                _cells(axes, panel[part], scales[part])
                title = f"{init}, {part} block{'s' if part != '1' else ''}"
                title = f"growth, {parts[1]} / {parts[0]} blocks" if part == "growth" else title
                axes.set_title(title, fontsize=8, loc="left", pad=14)
                axes.set_yticks(range(len(placements)), placements if column == 0 else [], fontsize=7.5)
                _separate(axes, settings.families, named=column == 2)
        return save(figure, path)


def _cells(axes: Axes, values: np.ndarray, scale: ScalarMappable) -> None:
    colours = scale.to_rgba(values)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    linear = np.where(colours[..., :3] <= 0.04045, colours[..., :3] / 12.92, ((colours[..., :3] + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    for i, j in np.ndindex(values.shape):
        text = f"{values[i, j]:.2g}" if values[i, j] < 100 else f"{values[i, j]:.0f}"
        ink = INK if luminance[i, j] > 0.18 else "white"  # the better contrast of the two, as WCAG measures it
        axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=ink)
    axes.set_xticks(range(len(GROUPS)), GROUPS)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, labelsize=7, pad=2)


def _separate(axes: Axes, families: Mapping[str, tuple[str, ...]], *, named: bool) -> None:
    """Draw a line between the families of placements and, beside the last map, their names."""
    ends = list(accumulate(map(len, families.values())))
    for name, end, size in zip(families, ends, map(len, families.values()), strict=True):
        if end < ends[-1]:
            axes.axhline(end - 0.5, color="white", linewidth=2.5)
        if named:
            where = (len(GROUPS) - 0.35, end - 0.5 - size / 2)
            axes.text(*where, _folded(name, size), rotation=-90, ha="left", va="center", fontsize=6.5, color=FAINT)


def _folded(name: str, rows: int) -> str:
    """Break a family's name where it is longer than its rows are high."""
    if len(name) * 0.055 < rows * ROW:
        return name
    words, lines = name.split(), [""]
    for word in words:
        if lines[-1] and (len(lines[-1]) + len(word)) * 0.055 > rows * ROW:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
