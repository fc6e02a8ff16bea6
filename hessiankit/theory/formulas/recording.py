"""A placement's equation, run on stages in place of tensors: the same two lines that the block's forward runs.

    Y = b.norm_1(X + b.attention(X))
    return b.norm_2(Y + b.feedforward(Y))

gives the stages F, R = X + F, Y, M, S = Y + M and Z. A value that the equation assigns to a name goes by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from derivations.arrays import Array
from derivations.gains import ColumnScaleAt, ScalarScaleAt
from derivations.operation import Renamed, shape_of
from derivations.stage import Names, Stage, names_after, total
from hessiankit.blocks.placements import Equation, steps
from hessiankit.theory.formulas.symbols import Factor, FactorAt, base_of, index_of, marked

Make = Callable[[str], Stage]


class StageValue:
    """A value of an equation: a stage, named when it is assigned to a name, or at its first use."""

    def __init__(self, make: Make, symbol: Callable[[], str], sums: list[str]) -> None:
        self._make, self._symbol, self._sums = make, symbol, sums
        self._stage: Stage | None = None

    @property
    def stage(self) -> Stage:
        """The stage, under its own symbol if no name was given."""
        return self.called(self._symbol()) if self._stage is None else self._stage

    def called(self, symbol: str) -> Stage:
        """Return the stage, under this symbol if it has none yet."""
        if self._stage is None:
            self._stage = self._make(symbol)
        return self._stage

    def __add__(self, summand: StageValue) -> StageValue:
        sum_name = self._sums.pop(0) if self._sums else None

        def make(name: str) -> Stage:
            return total(name, self.stage, summand.stage, names=sum_names(name), index=index_of)

        return StageValue(make, lambda: sum_name or f"({self.stage.symbol}+{summand.stage.symbol})", self._sums)

    def __mul__(self, factor: Parameter | float) -> StageValue:
        """Return this value times a number or a parameter; without a name it has a bar."""
        return StageValue(
            lambda name: _scaled(name, self.stage, factor), lambda: marked("bar", base_of(self.stage.symbol)), self._sums
        )

    __rmul__ = __mul__


@dataclass(frozen=True)
class Parameter:
    """A parameter of the block that an equation multiplies with: one entry for each feature, or a scalar."""

    name: str
    value: Array


def _scaled(name: str, X: Stage, factor: Parameter | float) -> Stage:
    """Return a stage times a number or a parameter, by broadcasting."""
    if not isinstance(factor, Parameter):
        printed = sympy.latex(factor.letter) if isinstance(factor, Factor) else f"{float(factor):.6g}"
        return Stage(name, FactorAt(X.value, factor), {"X": X}, rule=rf"{printed}\,{X.symbol}", index=index_of)
    vector = bool(shape_of(factor.value))
    operation = ColumnScaleAt(X.value, factor.value) if vector else ScalarScaleAt(X.value, factor.value)
    letter = "v" if vector else "a"
    rule = rf"{X.symbol}\operatorname{{diag}}({factor.name})" if vector else rf"{factor.name}\,{X.symbol}"
    alphabet = {"X": X.symbol, letter: factor.name}
    return Stage(name, Renamed(operation, {letter: factor.name}), {"X": X}, alphabet=alphabet, rule=rule, index=index_of)


def run(equation: Equation, parts: Any, X: StageValue) -> Stage:
    """Return the last stage of an equation; values have the names in its source, the last one is Z."""
    for name, value in steps(equation, parts, X):
        if isinstance(value, StageValue):
            value.called(name or "Z")
    return value.stage  # type: ignore[no-any-return]


def sum_names(symbol: str) -> Names | None:
    r"""Return the names of Closing the Curvature Gap for S, the sum before the last norm: B_i and xi_ij; None for others."""
    if symbol != "S":
        return None
    curvature, first, second = (name.format for name in ("S_{{{},{}}}", "B_{{{}}}", r"\xi_{{{},{}}}"))
    return replace(names_after(symbol), curvature=curvature, first=first, second=second)
