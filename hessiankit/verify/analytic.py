"""The user's own closed form of a Hessian beside hessiankit's and the references, and the correction of a wrong block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hessiankit.curvature.dense import Hessian
from hessiankit.curvature.operator import HessianOperator
from hessiankit.request.selection import locate
from hessiankit.support.errors import InputError
from hessiankit.tracing.source_line import first_line, returned
from hessiankit.verify.comparison import ANALYTIC, FLOOR, CheckRow
from hessiankit.verify.health import SideBySide
from hessiankit.verify.probes import Probes, normal
from hessiankit.verify.problem import Problem

Blocks: TypeAlias = dict[tuple[str, str], Tensor]
"""(row parameter, column parameter) -> d^2 loss / d vec_r(row) d vec_r(column)^T, (n_i, n_j), in the dtype that the user gave."""


def read_analytic(analytic: Any, problem: Problem) -> Blocks:
    """Return the blocks of a user's closed form: of a matrix (P, P), of blocks by pairs of names, or of a function of either.

    Raises:
        InputError: A name is unknown, or a matrix is not real or has another shape.

    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> problem = Problem(layer, torch.eye(2).double(), torch.zeros(2, 1).double())
    >>> read_analytic(lambda parameters: np.eye(2), problem)["weight", "weight"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    closed_form = analytic
    if callable(analytic):
        parameters = {name: x.clone() for name, x in problem.params.items()}
        closed_form = returned("check: analytic, called with a dict of the parameters,", analytic, parameters)
    shapes, slices, blocks = problem.batch.shapes, problem.slices, dict[tuple[str, str], Tensor]()
    if not isinstance(closed_form, Mapping):
        matrix = _matrix("analytic", closed_form, (problem.size,) * 2, f"a row for each entry of {', '.join(shapes)}")
        return {(i, j): matrix[slices[i], slices[j]] for i in shapes for j in shapes}
    for key, block in closed_form.items():
        parts = [locate("check: analytic", name, shapes) for name in key] if isinstance(key, tuple) else []
        if [rows for _, rows in parts] != [None, None]:
            raise InputError(f"check: analytic has the key {key!r}; expected a pair of names, such as {(*shapes, *shapes)[:2]}")
        i, j = (name for name, _ in parts)
        argument, meaning = f"analytic[{i!r}, {j!r}]", f"vec_r of {shapes[i]} and of {shapes[j]}"
        blocks[i, j] = _matrix(argument, block, (math.prod(shapes[i]), math.prod(shapes[j])), meaning, shapes[i] + shapes[j])
    return blocks


def _matrix(argument: str, value: Any, shape: tuple[int, ...], meaning: str, tensor_shape: tuple[int, ...] = ()) -> Tensor:
    """Return an array as a matrix of a shape; ``tensor_shape`` is an alternative shape."""
    try:
        x = value.detach().to_dense() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:  # lists of unequal lengths
        raise InputError(f"check: {argument} is no array ({first_line(error)}); expected numbers of shape {shape}") from error
    is_real = not x.is_complex() if isinstance(x, Tensor) else x.dtype.kind in "fiub"
    if not is_real or tuple(x.shape) not in (shape, tensor_shape or shape):
        kind = f"{argument} is a {type(value).__name__} of shape {tuple(x.shape)}, {x.dtype}"
        hint = "; its transpose has that shape" if tuple(x.shape) == shape[::-1] != shape else ""
        raise InputError(f"check: {kind}; expected real numbers of shape {shape}, {meaning}{hint}")
    return torch.as_tensor(x).reshape(shape)


def completed(blocks: Blocks, true: Tensor, slices: Mapping[str, slice], probes: Probes | None = None) -> Tensor:
    """Return a matrix (P, P), or products (n, P) along one direction on each of n parameters, with the user's blocks."""
    result = true.clone()
    for (i, j), block in blocks.items():
        rows, columns = slices[i], slices[j]
        at = (rows, columns) if probes is None else (probes.owners.index(j), rows)
        result[at] = block.to(result) if probes is None else block.to(result) @ probes.V[at[0], columns]
    return result


def analytic_rows(
    blocks: Blocks, routes: SideBySide, names: Iterable[str], hessian: Hessian | HessianOperator, rtol: float
) -> Iterator[CheckRow]:
    """Yield the rows of a user's blocks beside the closed form and references."""
    outer = cache(hessian.outer) if isinstance(hessian, Hessian) else None
    judge, notes, pairs = routes.judge, dict[str, str](), {f"{ANALYTIC}: {i} x {j}": (i, j) for i, j in blocks}
    for name in names:
        gaps = routes.gaps(ANALYTIC, name)
        floor = FLOOR * judge.eps * gaps.scale.amax()
        if bool(((gaps.second <= floor) & (gaps.gap > 0)).any()):  # a block that is 0: the user's has a rounding of its own
            is_zero = gaps.second <= judge.noise.floor(gaps.labels).to(floor).clamp(max=floor)
            gaps = gaps._replace(slack=gaps.slack + floor * is_zero)
        cells = {row: [(judge.names.index(i), gaps.labels.index(j))] for row, (i, j) in pairs.items()}
        for row in judge.rows(gaps, rtol, name, 0.0, cells):
            if not row.passed and row.name not in notes:
                notes[row.name] = _note(
                    *pairs[row.name], blocks[pairs[row.name]].to(gaps.gap), hessian, outer, routes.problem, rtol
                )
            yield row if row.passed else replace(row, note=notes[row.name])


def _note(
    i: str,
    j: str,
    block: Tensor,
    hessian: Hessian | HessianOperator,
    outer: Callable[[], Tensor] | None,
    problem: Problem,
    rtol: float,
) -> str:
    """Return the change that corrects a wrong block, by products along generic directions, and the row that differs most."""
    V = normal((block.shape[1], 3), torch.Generator().manual_seed(0), problem.theta)
    targets = {"": hessian[i, j] @ V}
    if outer is not None:
        with suppress(InputError):  # a loss that reads several tensors has no Gauss-Newton part
            targets["its functional part is added (it is the Gauss-Newton part alone)"] = (
                outer()[problem.slices[i], problem.slices[j]] @ V
            )
    remedies = list[list[str]]()
    for addition, target in targets.items():
        for change, variant in _variants(block, problem.params[i], problem.params[j]):
            x = variant @ V
            factor = float((x * target).sum() / x.square().sum())
            if factor and float((factor * x - target).abs().max()) <= rtol * float(target.abs().max()):
                remedies.append([words for words in (change, _factor(factor, problem, rtol), addition) if words])
    remedy = (
        f"your block is right if {' and '.join(sorted(remedies, key=len)[0])}"
        if remedies
        else "no transpose, order, sign or factor makes your block right"
    )
    difference = (block @ V - targets[""]).abs().amax(1)
    row, count = int(difference.argmax()), int((~(difference <= rtol * targets[""].abs().max())).sum())
    true_row = hessian[j, i] @ (torch.arange(len(block), device=problem.device) == row).to(problem.theta)
    column = int((block[row] - true_row).abs().argmax())
    return (
        f"{remedy}; entry {_entry(i, row, problem)} x {_entry(j, column, problem)} is {float(block[row, column]):.6g}, and "
        f"should be {float(true_row[column]):.6g}; {count} of {len(block)} rows differ"
    )


def _entry(name: str, position: int, problem: Problem) -> str:
    """Return an entry of a parameter, such as weight[1, 2], by its position in vec_r."""
    return name + f"[{', '.join(map(str, np.unravel_index(position, problem.params[name].shape)))}]".replace("[]", "")


def _variants(block: Tensor, row_parameter: Tensor, column_parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a block (n_i, n_j) of two parameters as it is, transposed and reordered, each with the change in words."""
    yield "", block
    if block.shape[0] == block.shape[1]:
        yield "transposed", block.T
    parameters = (row_parameter, column_parameter)
    rows, columns = (
        torch.arange(x.numel(), device="cpu").view(x.shape[::-1]).permute(*range(x.ndim)[::-1]).flatten() for x in parameters
    )
    order = "reordered from column-stacking (vec_c) to vec_r"
    yield f"{order} (of a Kronecker product: the factors swapped)", block[rows][:, columns]
    yield f"its rows are {order}", block[rows]
    yield f"its columns are {order}", block[:, columns]


def _factor(factor: float, problem: Problem, rtol: float) -> str:
    """Return a factor in words; "" for 1."""
    meanings, entries = dict[float, str](), problem.target.numel() if isinstance(problem.target, Tensor) else 1
    for noun, n in (("samples", problem.batch.n_samples), ("entries of the target", entries)):
        meanings |= {
            n: f"multiplied by {n}, the number of {noun}",
            1 / n: f"divided by {n}, the number of {noun}",
            2 / n: f"multiplied by 2/{n}, with {n} {noun}",
            n / 2: f"multiplied by {n}/2, with {n} {noun}",
        }
    meanings |= {1.0: "", 2.0: "doubled", 0.5: "halved", -1.0: "negated"}
    matches = [words for value, words in meanings.items() if abs(factor - value) <= 10 * rtol * abs(value)]
    return matches[-1] if matches else f"multiplied by {factor:.6g}"
