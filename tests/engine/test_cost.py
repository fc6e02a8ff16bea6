"""What a sweep is said to take against a meter, within factors: refusals and choices follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import cut_models
import pytest
import torch
from curvature_reference import Formula, draw
from engine_choices import CHOICES, force, paths_of
from meter import Meter
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine import diagonal_rows, sections
from hessiankit.engine.block_rows import BlockRows
from hessiankit.engine.cost import CALL, MATMUL, sweep_cost
from hessiankit.engine.matrix_rows import MatrixRows
from hessiankit.engine.paths import Paths, Reach
from hessiankit.engine.storage import SymmetricStorage


def measured(paths: Paths, *, alone: bool) -> Meter:
    """Return a meter that a sweep has run under."""
    slices, start = dict[str, slice](), 0
    for name, at in paths.trace.parameters.items():
        slices[name] = slice(start, start + paths.value(at).numel())
        start = slices[name].stop
    matrix = SymmetricStorage(slices, torch.float64, torch.device("cpu")) if not alone else None
    with torch.no_grad(), Meter() as meter:
        if matrix is None:
            diagonal_rows.read_diagonal(paths, sections.sections(paths, is_diagonal=True), lambda u, values: None)
        else:
            BlockRows(paths, sections.sections(paths)).read(MatrixRows(matrix, paths.tied))
    return meter


def mlp(*widths: int) -> nn.Module:
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    torch.manual_seed(0)
    if name.startswith("mlp"):
        widths = {"mlp, narrow": (10, 2, 12, 2, 5), "mlp, many rows": (4, 8, 4)}[name]
        rows = 200 if "many" in name else 16
        return mlp(*widths), draw(rows, widths[0]), draw(rows, widths[-1], seed=2), "mse"
    if name.startswith("block"):
        d, f, L = {"block, wide": (4, 60, 4), "block, long": (4, 8, 24)}[name]
        return hk.TransformerBlock(d, f, n_heads=2).double(), draw(2, L, d), draw(2, L, d, seed=2), "mse"
    model = hk.Transformer(11, 8, 16, 4, n_heads=2, seed=0).double()
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    return model, tokens, tokens.flip(1), "cross_entropy"


PROBLEMS = ("mlp, narrow", "mlp, many rows", "block, wide", "block, long", "language model")


TWO = ("mlp, narrow", "block, wide")
CHOSEN = [(name, None) for name in PROBLEMS] + [(name, how) for name in TWO for how in ("cuts", "no cuts, each place by itself")]
"""Problems and what is forced for them; of those with a cut, each kind once."""


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("name", "choice"), CHOSEN)
def test_against_the_meter(name: str, alone: bool, choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *rest = problem(name)
    if choice:
        force(monkeypatch, CHOICES[choice])
    paths = paths_of(module, *rest, by_column=alone)
    cost = sweep_cost(paths, sections.sections(paths, is_diagonal=alone), is_diagonal=alone)
    meter = measured(paths, alone=alone)
    lower, upper = (0.8, 5.0) if alone else (0.8, 1.4)
    assert lower <= cost.multiplications / (meter.flops / 2) <= upper
    assert 0.2 <= cost.operations / meter.operations <= 2
    assert 0.25 <= 8 * cost.numbers / meter.peak <= (25 if alone else 4)
    assert cost.work == cost.operations * CALL + cost.multiplications / MATMUL + cost.passes


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["block, wide", "language model", "recurrence"])
def test_a_path_that_grows_takes_what_the_whole_takes(name: str, alone: bool) -> None:
    """In any order: the values before, behind and beside those that move already."""
    loop = Formula(lambda m, x: torch.tanh(torch.tanh(x @ m.W) @ m.W * x @ m.W), W=(4, 4))
    module, *rest = (loop, draw(2, 3, 4), draw(2, 3, 4, seed=2), "mse") if name == "recurrence" else problem(name)
    paths = paths_of(module, *rest)
    for order in (1, -1):
        places = paths.places[::order][:12]
        reach = Reach(paths, paths.steps, is_diagonal=alone)
        for n, place in enumerate(places, 1):
            reach.add(place.at)
            path = reach.path
            moving = {p.at for p in places[:n]} | {step.output for step in path}
            assert [step.output for step in path] == [s.output for s in paths.steps if not moving.isdisjoint(s.inputs)]
            for step in path:
                assert all(at is None or at in moving for at in step.inputs)
            work = paths.work(path)
            assert reach.numbers == (work.tangent_numbers if alone else work.numbers)
            assert reach.level(place.at) == paths.level(place.at, path)


def test_what_each_part_of_a_program_takes() -> None:
    """A multilayer perceptron of two layers, counted by hand."""
    module, rows = mlp(5, 7, 3), 11
    paths = paths_of(module, draw(rows, 5), draw(rows, 3, seed=2), "mse")
    cost = sweep_cost(paths, sections.sections(paths))
    first, last = 5 * 7 + 7, 7 * 3 + 3
    sums = rows * (first * (first + last) + last * last)
    assert cost.directions == 7 + 3
    assert cost.multiplications == sums + (7 + 3) * 2 * rows * 3 * 7  # together through the second layer: pushed and pulled
    assert cost.coupled == 0


def test_a_product_of_two_values_that_move_is_pushed_bent_and_pulled_by_both() -> None:
    """Z Z^T of four tokens, each a row of two numbers, in two samples."""
    module = Formula(lambda m, x: torch.tanh(x @ m.W) @ torch.tanh(x @ m.W).mT, W=(3, 2))
    paths = paths_of(module, draw(2, 4, 3), draw(2, 4, 4, seed=2), "mse")
    path = paths.reach([place.at for place in paths.places])
    assert paths.work(path).multiplications == (2 + 2 + 2) * 2 * 4 * 4 * 2
    assert paths.work(path).diagonal == (2 + 2) * 2 * 4 * 4 * 2


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", cut_models.MODELS)
def test_sections_take_about_as_little_as_any_that_were_tried(name: str, alone: bool) -> None:
    """Of the whole trace, all cuts, a few at even distances, each cut by itself, and the chosen with one more or one fewer.

    Or no cut, of a trace whose sweeps take less than the choice itself would.
    """
    paths = paths_of(*cut_models.problem(name), by_column=alone)
    values = sections.stream(paths)

    def work(cuts: Collection[int] | None) -> float:
        return sweep_cost(paths, sections.sections(paths, cuts, is_diagonal=alone), is_diagonal=alone).work

    chosen = {section.end for section in sections.sections(paths, is_diagonal=alone)} - {paths.output}
    tried = [set[int](), set(values), *(chosen ^ {at} for at in values), *({at} for at in values)]
    tried += [set(values[len(values) // (2 * k) :: len(values) // k]) for k in range(1, 1 + min(8, len(values)))]
    assert work(None) == work(chosen)
    whole = sections._Division(paths, is_diagonal=alone).work(-1, len(paths.steps) - 1)
    assert work(chosen) <= 1.15 * min(map(work, tried)) or (whole < sections.CHOICE * CALL * len(paths.steps) and not chosen)
