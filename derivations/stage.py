r"""A computation as named stages, each an operation on stages before it, so that its derivatives read like a paper's.

The chain rule is that of ``derivations.composition``. What a stage adds are names: a derivative that takes more than
two letters to write is given one of its own and defined once, as "Closing the Curvature Gap" does with J_Z, B_i, G_k,
xi_ij and Phi_kl. ``definitions`` lists what a formula refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from derivations.arrays import Array
from derivations.composition import Composite
from derivations.matrix import Matrix, Named, Sum, Zero, letters
from derivations.operation import Operation, Shape, Total, Variable, expect_names


@dataclass(frozen=True)
class Names:
    r"""How a stage's derivatives are called.

    Args:
        slope: of its first derivative in a stage that it reads, from that stage's symbol.
        curvature: of its second derivative in two arguments.
        first: of its derivative in a parameter, from the parameter's index.
        second: of its second derivative in two parameters, from their indices.
    """

    slope: Callable[[str], str]
    curvature: Callable[[str, str], str]
    first: Callable[[str], str]
    second: Callable[[str, str], str]


def names_after(symbol: str) -> Names:
    r"""Return the plain names: J_{Z S} and H_{Z,S S} for the operation, Z_Q and Z_{Q,V} for the whole.

    >>> names = names_after("Z")
    >>> names.slope("S"), names.first("Q"), names.second("Q", "V")
    ('J_{Z S}', 'Z_{Q}', 'Z_{Q,V}')
    """
    return Names(
        lambda a: f"J_{{{symbol} {a}}}",
        lambda a, b: f"H_{{{symbol},{a} {b}}}",
        lambda i: f"{symbol}_{{{i}}}",
        lambda i, j: f"{symbol}_{{{i},{j}}}",
    )


@dataclass(frozen=True, eq=False)
class Stage:
    """A value on the way, with its symbol, the operation that made it, and the stages that the operation reads.

    It is an operation on the parameters of everything before it.

    Args:
        symbol: LaTeX of the value.
        operation: at its point; its arguments are those named in ``reads``, and parameters.
        reads: argument of the operation -> the stage that is put in for it.
        alphabet: letters in which the operation's own chapter is to be printed (``derivations.matrix.letters``).
        rule: LaTeX of what the value is, as in Z = rule.
        names: how the derivatives are called; after the symbol by default.
        index: name of a parameter -> its index in the names of derivatives.
        inside: stages that the operation itself is made of.
    """

    symbol: str
    operation: Operation
    reads: Mapping[str, Stage] = field(default_factory=dict)
    alphabet: Mapping[str, str] = field(default_factory=dict)
    rule: str = ""
    names: Names | None = None
    index: Callable[[str], str] = str
    inside: tuple[Stage, ...] = ()

    @property
    def value(self) -> Array:
        """The value at the point."""
        return self.operation.value

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The parameters that the value depends on."""
        return self._whole.arguments

    def jacobian(self, name: str) -> Matrix:
        """Return the derivative in a parameter, by the names of what it is made of."""
        expect_names(self, "jacobian", name)
        if name not in self._made:
            found = self._whole.jacobian(name)
            reason = f"first derivative of ${self.symbol}$ in ${self.index(name)}$"
            self._made[name] = named(found, self._called.first(self.index(name)), reason)
        return self._made[name]

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return the second derivative in two parameters, by the names of what it is made of."""
        expect_names(self, "hessian", name_i, name_j)
        key = name_i + "," + name_j
        if key not in self._made:
            found = self._whole.hessian(name_i, name_j)
            i, j = self.index(name_i), self.index(name_j)
            self._made[key] = named(found, self._called.second(i, j), f"second derivative of ${self.symbol}$ in ${i}$ and ${j}$")
        return self._made[key]

    def seen_from(self, cut: Stage) -> Operation:
        """Return the same operation with ``cut`` an open argument, called by its symbol, wherever it is reached."""
        if cut is self:
            return Variable(cut.symbol, cut.value)
        if not self.depends_on(cut):
            return self
        if cut.symbol not in self._seen:
            inner = {name: stage.seen_from(cut) for name, stage in self.reads.items()}
            self._seen[cut.symbol] = _Accumulated(self, Composite(self._lettered, inner), cut)
        return self._seen[cut.symbol]

    def depends_on(self, other: Stage) -> bool:
        """Tell whether the other stage is this one or comes before it on some path."""
        return other is self or any(stage.depends_on(other) for stage in self.reads.values())

    @property
    def before(self) -> list[Stage]:
        """This stage and all before it, the nearest last, each once."""
        found: list[Stage] = []
        for stage in self.reads.values():
            found += [s for s in stage.before if s not in found]
        return [*found, self]

    @property
    def story(self) -> list[Stage]:
        """This stage and all that it is made of, in the order of the computation, each once."""
        found: list[Stage] = []
        for stage in (*self.reads.values(), *self.inside):
            found += [s for s in stage.story if s not in found]
        return [*found, self]

    @property
    def equation(self) -> str:
        """Symbol = rule, in LaTeX."""
        return f"{self.symbol} = {self.rule}" if self.rule else self.symbol

    @cached_property
    def _called(self) -> Names:
        return self.names or names_after(self.symbol)

    @cached_property
    def _lettered(self) -> _Lettered:
        return _Lettered(self)

    @cached_property
    def _whole(self) -> Composite:
        return Composite(self._lettered, self.reads)

    @cached_property
    def _made(self) -> dict[str, Matrix]:
        return {}

    @cached_property
    def _seen(self) -> dict[str, Operation]:
        return {}


@dataclass(frozen=True, eq=False)
class _Lettered:
    """A stage's operation with its derivatives in the stage's letters; those in other stages have names."""

    stage: Stage

    @property
    def value(self) -> Array:
        return self.stage.operation.value

    @property
    def arguments(self) -> Mapping[str, Shape]:
        return self.stage.operation.arguments

    @cached_property
    def _made(self) -> dict[str, Matrix]:
        return {}

    def jacobian(self, name: str) -> Matrix:
        if name not in self._made:
            stage = self.stage
            with letters(stage.alphabet):
                found = stage.operation.jacobian(name)
            if name in stage.reads:
                symbol = stage.reads[name].symbol
                found = named(found, stage._called.slope(symbol), f"derivative of ${stage.equation}$ in ${symbol}$")
            self._made[name] = found
        return self._made[name]

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        key = name_i + "," + name_j
        if key not in self._made:
            stage = self.stage
            with letters(stage.alphabet):
                found = stage.operation.hessian(name_i, name_j)
            if name_i in stage.reads or name_j in stage.reads:
                i, j = (stage.reads[n].symbol if n in stage.reads else stage.index(n) for n in (name_i, name_j))
                reason = f"second derivative of ${stage.equation}$ in ${i}$ and ${j}$"
                found = named(found, stage._called.curvature(i, j), reason)
            self._made[key] = found
        return self._made[key]


@dataclass(frozen=True, eq=False)
class _Accumulated:
    """A stage seen from an earlier one: the same names for the same things."""

    stage: Stage
    whole: Composite
    cut: Stage

    @property
    def value(self) -> Array:
        return self.stage.value

    @property
    def arguments(self) -> Mapping[str, Shape]:
        return self.whole.arguments

    def _index(self, name: str) -> str:
        return name if name == self.cut.symbol else self.stage.index(name)

    def jacobian(self, name: str) -> Matrix:
        found, i = self.whole.jacobian(name), self._index(name)
        symbol = f"J_{{{self.stage.symbol} {i}}}" if name == self.cut.symbol else self.stage._called.first(i)
        return named(found, symbol, f"first derivative of ${self.stage.symbol}$ in ${i}$")

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        found, i, j = self.whole.hessian(name_i, name_j), self._index(name_i), self._index(name_j)
        if self.cut.symbol in (name_i, name_j):
            symbol = f"H_{{{self.stage.symbol},{i} {j}}}"
        else:
            symbol = self.stage._called.second(i, j)
        return named(found, symbol, f"second derivative of ${self.stage.symbol}$ in ${i}$ and ${j}$")


def total(symbol: str, left: Stage, right: Stage, *, names: Names | None = None, index: Callable[[str], str] = str) -> Stage:
    """Return the sum of two stages as one.

    What both summands read is kept as one argument: the derivative of Y + FFN(Y) is (I + J) Y_k and not Y_k + J Y_k, as in
    the papers.
    """
    rule = f"{left.symbol} + {right.symbol}"
    common = [stage for stage in left.before if right.depends_on(stage)]
    if not common:
        reads = {left.symbol: left, right.symbol: right}
        whole = Total(*(Variable(name, stage.value) for name, stage in reads.items()))
        return Stage(symbol, whole, reads, rule=rule, names=names, index=index)
    cut = common[-1]
    whole = Total(left.seen_from(cut), right.seen_from(cut))
    return Stage(symbol, whole, {cut.symbol: cut}, rule=rule, names=names, index=index, inside=(left, right))


def leaf(name: str, value: Array) -> Stage:
    """Return a parameter or an input as a stage."""
    return Stage(name, Variable(name, value))


def named(matrix: Matrix, symbol: str, reason: str) -> Matrix:
    """Return the expression under a name, or as it is where it is short or has one."""
    return matrix if isinstance(matrix, Zero) or _letters_in(matrix) < 3 else Named(symbol, matrix, reason)


def _letters_in(matrix: Matrix) -> int:
    """Count the factors that a reader sees."""
    if isinstance(matrix, Named) or not matrix.children():
        return 1
    return sum(_letters_in(child) for child in matrix.children()) + isinstance(matrix, Sum)
