"""A placement's equation, run on stages in place of tensors: the same two lines that the block's forward runs.

    Y = b.norm_1(X + b.attention(X))
    return b.norm_2(Y + b.feedforward(Y))

gives the stages F, R = X + F, Y, M, S = Y + M and Z. A value that the equation assigns to a name goes by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from derivations.gains import ColumnScaleAt, ScalarScaleAt
from derivations.operation import Renamed, shape_of
from derivations.stage import Names, Stage, total
from hessiankit.blocks.placements import Equation, steps
from hessiankit.formulas.symbols import Factor, FactorAt, bar, index_of

Make = Callable[[str], Stage]


class StageValue:
    """A value of an equation: a stage that gets its symbol when it is first needed, or when it is assigned to a name."""

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

    def __add__(self, other: StageValue) -> StageValue:
        own = self._sums.pop(0) if self._sums else None

        def make(name: str) -> Stage:
            return total(name, self.stage, other.stage, names=sum_names(name), index=index_of)

        return StageValue(make, lambda: own or f"({self.stage.symbol}+{other.stage.symbol})", self._sums)

    def __rmul__(self, c: float) -> StageValue:
        printed = sympy.latex(c.letter) if isinstance(c, Factor) else f"{float(c):.6g}"
        return self.multiple(
            lambda name, X: Stage(name, FactorAt(X.value, c), {"X": X}, rule=rf"{printed}\,{X.symbol}", index=index_of)
        )

    def __mul__(self, factor: Parameter) -> StageValue:
        return factor.times(self)

    def multiple(self, make: Callable[[str, Stage], Stage]) -> StageValue:
        """Return this value times something: (symbol, this stage) -> the stage; without a name it has a bar."""
        return StageValue(lambda name: make(name, self.stage), lambda: bar(self.stage.symbol), self._sums)


class Parameter:
    """A parameter of the block that an equation multiplies with: one entry for each feature, or a scalar."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def times(self, value: StageValue) -> StageValue:
        """Return value * parameter, as broadcasting has it."""

        def make(name: str, X: Stage) -> Stage:
            vector = bool(shape_of(self.value))
            operation = ColumnScaleAt(X.value, self.value) if vector else ScalarScaleAt(X.value, self.value)
            letter = "v" if vector else "a"
            rule = rf"{X.symbol}\operatorname{{diag}}({self.name})" if vector else rf"{self.name}\,{X.symbol}"
            alphabet = {"X": X.symbol, letter: self.name}
            return Stage(name, Renamed(operation, {letter: self.name}), {"X": X}, alphabet=alphabet, rule=rule, index=index_of)

        return value.multiple(make)

    def __mul__(self, value: StageValue) -> StageValue:
        return self.times(value)


def run(equation: Equation, parts: Any, X: StageValue) -> Stage:
    """Return the last stage of an equation; values take the names that its source gives them, the last one is Z."""
    for name, value in steps(equation, parts, X):
        if isinstance(value, StageValue):
            value.called(name or "Z")
    return value.stage  # type: ignore[no-any-return]


def sum_names(symbol: str) -> Names | None:
    r"""Return the names of Closing the Curvature Gap for S, the sum before the last norm: B_i and xi_ij; None for others."""
    if symbol != "S":
        return None
    return Names(
        lambda a: f"J_{{S {a}}}",
        lambda a, b: f"S_{{{a},{b}}}",
        lambda i: f"B_{{{i}}}",
        lambda i, j: rf"\xi_{{{i},{j}}}",
    )
