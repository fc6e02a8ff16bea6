"""A plan of reverse Hessian accumulation: the vertices of a Transformer block, their parents, and the products for each block.

Drawn for docs/concepts/one_sum.md. The block is the paper's: post-norm, one head, L = 6, d = 4, d_ff = 8, squared error, float64.
Its vertices and the bytes of the Jacobians on the edges are those that the engine finds in its trace; of the products, bytes are
counted over the steps of the plan of :func:`hessiankit.hessian_function` that write a block of two parameters, in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

import hessiankit as hk
from figures._kit import page, save, style, write_rows
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.problem.batches import gather
from hessiankit.engine.problem.loss_trace import loss_trace, normalizer_of
from hessiankit.engine.problem.task import gib
from hessiankit.support.kernels import plain

NAME = Path(__file__).stem
TOKENS, WIDTH, HIDDEN = 6, 4, 8
SHORT = {"norm_1.weight": r"$\gamma_1$", "norm_1.bias": r"$\beta_1$", "norm_2.weight": r"$\gamma_2$", "norm_2.bias": r"$\beta_2$"}


def problem() -> tuple[hk.TransformerBlock, torch.Tensor, torch.Tensor]:
    """Return the block, tokens (1, L, d) and targets."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(WIDTH, HIDDEN).double()
    return block, *torch.randn(2, 1, TOKENS, WIDTH, dtype=torch.float64)


def swept() -> ForwardSweep:
    """Return the vertices of the block's loss, and the curvature that its operations put between them."""
    (task,), _ = gather(*problem(), "mse", None)
    with task.at(), torch.no_grad():
        sweep = ForwardSweep(loss_trace(task, normalizer_of(task)).trace)
        sweep.run()
    return sweep


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw the vertices and the blocks, and write the products; ``quick`` changes nothing: it takes seconds."""
    out.mkdir(parents=True, exist_ok=True)
    sweep = swept()
    with plain():
        plan = hk.hessian_function(*problem()).plan
    assert plan is not None
    names = [name for name, _ in problem()[0].named_parameters()]
    steps = {(i, j): plan.explain(i, j).steps for n, i in enumerate(names) for j in names[n:]}
    moved = {pair: sum(step.bytes for step in some) for pair, some in steps.items()}
    rows = [{"row": i, "column": j, "steps": len(steps[i, j]), "bytes": count} for (i, j), count in moved.items()]
    with style():
        figure = page(11.0, 6.4)
        above, below = figure.subplots(
            2, 1, height_ratios=(1.0, 1.5), gridspec_kw={"left": 0.06, "right": 0.99, "top": 0.92, "bottom": 0.05, "hspace": 0.16}
        )
        _vertices(above, sweep)
        _blocks(below, names, moved)
        return [save(figure, out / f"{NAME}{suffix}"), write_rows(out / f"{NAME}.csv", rows)]


def _vertices(axes: Axes, sweep: ForwardSweep) -> None:
    """Draw vertices that others are computed from in a line, those of a weight's own rows above what they meet."""
    vertices = sweep.vertices
    moving = {s for vertex in vertices.values() for stack in vertex.parents.values() for s in stack.vertices}
    line = [t for t in vertices if t in moving or vertices[t].parents]
    places = {t: (float(k), 0.0) for k, t in enumerate(line)}
    curvature = {**dict.fromkeys(sweep.blocks.of, "-"), **dict.fromkeys(sweep.blocks.diagonals, ":")}
    places |= {t: (places[r][0], 1.0) for pair in curvature for t, r in (pair, pair[::-1]) if t not in places}
    for t, (x, y) in places.items():
        for stack in vertices[t].parents.values():
            for s in stack.vertices:
                bend = f"arc3,rad={0.35 * (places[s][0] < x - 1)}"
                arrow = {"arrowstyle": "-|>", "connectionstyle": bend, "shrinkA": 23, "shrinkB": 23}
                axes.annotate("", (x, y), places[s], arrowprops=arrow)
            axes.text(x - 0.5, 0.12, gib(stack.bytes), ha="center", fontsize=7)
        entering = ", ".join(_short(jacobian.parameter) for jacobian in vertices[t].jacobians) or "none"
        text = f"{t}: {vertices[t].rows(vertices[t].axes)} x {vertices[t].width}\n{entering}"
        colour = "#E69F00" if y else "#0072B2"
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, bbox={"boxstyle": "round", "fc": colour, "alpha": 0.25})
    for (t, r), line_style in curvature.items():
        if t != r:
            axes.plot([places[t][0], places[r][0]], [0.78, 0.22], line_style, color="#D55E00")
        else:
            axes.plot(places[t][0], -0.3, "o", color="#D55E00", markersize=5)
    axes.set(xlim=(-0.5, len(line) - 0.5), ylim=(-0.75, 1.3))
    axes.set_title(
        "Vertices (rows x entries, parameters that enter) and Jacobians by their parents, with bytes; orange: curvature that\n"
        "operations put between two vertices (dotted: diagonal) or at one (dot). Elimination runs from right to left.",
        fontsize=9,
    )
    axes.axis("off")


def _short(name: str) -> str:
    return SHORT.get(name) or f"${name.rpartition('.')[2]}$"


def _blocks(axes: Axes, names: list[str], moved: dict[tuple[str, str], int]) -> None:
    """Draw the bytes that the steps which write a block read and write."""
    grid = np.array([[moved.get((i, j), np.nan) for j in names] for i in names])
    axes.imshow(np.ma.masked_invalid(np.where(grid == 0, np.nan, grid)), norm=LogNorm(), cmap="Blues", alpha=0.6, aspect="auto")
    for (i, j), count in moved.items():
        axes.text(names.index(j), names.index(i), gib(count) if count else "0", ha="center", va="center", fontsize=8)
    labels = [_short(name) for name in names]
    axes.set_xticks(range(len(names)), labels)
    axes.set_yticks(range(len(names)), labels)
    axes.set_title("Bytes read and written by the steps of the plan that write each block of the Hessian", fontsize=9)
    axes.grid(visible=False)
