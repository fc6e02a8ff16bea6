r"""A computation as named stages, each an operation on stages before it, so that its derivatives read like a paper's.

The chain rule is that of ``derivations.composition``. A stage adds names: a derivative that takes more than
two letters to write is given one of its own and defined once, as "Closing the Curvature Gap" does with J_Z, B_i, G_k,
xi_ij and Phi_kl. ``definitions`` lists the names in a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

from derivations.arrays import Array
from derivations.composition import Composite
from derivations.matrix import Matrix, Named, Sum, Zero
from derivations.operation import Lettered, Operation, Renamed, Shape, Total, Variable, expect_names

Record = Callable[[str, Array], Array]
"""(symbol, value) -> the value in other words, such as names for its entries."""
_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded(record: Record) -> Iterator[None]:
    """Pass the value of each stage that is computed inside through ``record``: what reads it reads names, not expressions."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


@dataclass(frozen=True)
class Names:
    r"""How a stage's derivatives are called.

    Args:
        slope: Name of its first derivative with respect to a stage that it reads, from that stage's symbol.
        curvature: Name of its second derivative with respect to two arguments.
        first: Name of its derivative with respect to a parameter, from the parameter's index.
        second: Name of its second derivative with respect to two parameters, from their indices.
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


@dataclass(frozen=True)
class Term:
    """A summand of a derivative with its description in words (LaTeX between dollars)."""

    matrix: Matrix
    meaning: str


def named(matrix: Matrix, symbol: str, reason: str) -> Matrix:
    """Return the expression under a name, or as it is where it is short or has one."""
    return matrix if isinstance(matrix, Zero) or _letters_in(matrix) < 3 else Named(symbol, matrix, reason)


def _letters_in(matrix: Matrix) -> int:
    """Count the factors that a reader sees."""
    if isinstance(matrix, Named) or not matrix.children():
        return 1
    return sum(_letters_in(child) for child in matrix.children()) + isinstance(matrix, Sum)


@dataclass(frozen=True, eq=False)
class Stage:
    """A value on the way, with its symbol, the operation that made it, and the stages that the operation reads.

    It is an operation on the parameters of everything before it.

    Args:
        symbol: LaTeX of the value.
        operation: at its point; its arguments are those named in ``reads``, and parameters.
        reads: argument of the operation -> the stage that is put in for it.
        alphabet: letters in which the operation's own chapter is to be printed (``derivations.matrix.letters``).
        rule: LaTeX of the right side, as in Z = rule.
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

    @cached_property
    def value(self) -> Array:
        """The value at the point, in the names that ``recorded`` gives to its entries."""
        record = _RECORD.get()
        return self.operation.value if record is None else record(self.symbol, self.operation.value)

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The parameters that the value depends on."""
        return self._whole.arguments

    def jacobian(self, name: str) -> Matrix:
        """Return the derivative with respect to a parameter, in named parts."""
        expect_names(self, "jacobian", name)
        if name not in self._made:
            reason = f"first derivative of ${self.symbol}$ with respect to ${name}$: {self.rule_of(name)}"
            self._made[name] = named(self._whole.jacobian(name), self._called.first(self.index(name)), reason)
        return self._made[name]

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return the second derivative with respect to two parameters, in named parts."""
        expect_names(self, "hessian", name_i, name_j)
        key = name_i + "," + name_j
        if key not in self._made:
            i, j = self.index(name_i), self.index(name_j)
            rule = self.rule_of(name_i, name_j)
            reason = f"second derivative of ${self.symbol}$ with respect to ${name_i}$ and ${name_j}$: {rule}"
            self._made[key] = named(self._whole.hessian(name_i, name_j), self._called.second(i, j), reason)
        return self._made[key]

    def terms(self, *names: str) -> list[Term]:
        """Return the summands of the first or the second derivative, each with a description in words.

        Their sum is ``jacobian(name)``, or ``hessian(name_i, name_j)``.

        Raises:
            ValueError: if a name is unknown.
        """
        expect_names(self, "terms", *names)
        whole, own = self._whole, self.symbol
        reading = [{a: self._spoken(a) for a in whole.reading(name)} for name in names]
        if len(names) == 1:
            summands = []
            for a, said in reading[0].items():
                inner = f" times that of ${said}$ with respect to ${names[0]}$" if a in self.reads else ""
                summands.append((whole.through(a, *names), _slope(own, said) + inner))
        else:
            summands = [
                (whole.through(a, *names), f"{_slope(own, said)} times second derivative of ${said}$")
                for a, said in reading[0].items()
                if a in reading[1] and a in self.reads
            ]
            for a, said in reading[0].items():
                for b, other in reading[1].items():
                    text = f"second derivative of ${own}$ with respect to ${said}$" + (f" and ${other}$" if a != b else "")
                    inside = [s for k, s in ((a, said), (b, other)) if k in self.reads]
                    one = f", times the first derivative of ${''.join(inside)}$"
                    slopes = {0: "", 1: one}.get(len(inside), ", between two first derivatives")
                    summands.append((whole.between(a, b, *names), text + slopes))
        return [Term(matrix, text) for matrix, text in summands if not isinstance(matrix, Zero)]

    def seen_from(self, cut: Stage) -> Operation:
        """Return the same operation with ``cut`` an open argument, called by its symbol, wherever it is reached."""
        if cut is self:
            return Variable(cut.symbol, cut.value)
        if not self.depends_on(cut):
            return self
        if cut.symbol not in self._seen:
            inner = {name: stage.seen_from(cut) for name, stage in self.reads.items()}
            self._seen[cut.symbol] = _Accumulated(self, Composite(self._named, inner), cut)
        return self._seen[cut.symbol]

    def depends_on(self, other: Stage) -> bool:
        """Tell whether the other stage is this one or comes before it on some path."""
        return other is self or any(stage.depends_on(other) for stage in self.reads.values())

    @property
    def before(self) -> list[Stage]:
        """This stage and all before it, the nearest last, each once."""
        stages: list[Stage] = []
        for stage in self.reads.values():
            stages += [s for s in stage.before if s not in stages]
        return [*stages, self]

    @property
    def story(self) -> list[Stage]:
        """This stage and all that it is made of, in the order of the computation, each once."""
        stages: list[Stage] = []
        for stage in (*self.reads.values(), *self.inside):
            stages += [s for s in stage.story if s not in stages]
        return [*stages, self]

    @property
    def equation(self) -> str:
        """Symbol = rule, in LaTeX."""
        return f"{self.symbol} = {self.rule}" if self.rule else self.symbol

    @property
    def spoken(self) -> str:
        """The equation, or the symbol alone where the rule is in words or in several equations."""
        return self.symbol if r"\text" in self.rule or r"\quad" in self.rule else self.equation

    @property
    def chapter(self) -> str:
        """The module that has the closed form of the operation."""
        operation = self.operation
        while isinstance(operation, Renamed):
            operation = operation.operation
        return type(operation).__module__.removeprefix("derivations.")

    def rule_of(self, *names: str) -> str:
        """Say which rule gives a derivative of the whole: the operation's closed form, or the chain rule and through what."""
        through = dict.fromkeys(s.symbol for name in names for s in self.reads.values() if name in s.arguments)
        if not through:
            return f"closed form ({self.chapter})"
        order = " to second order" if len(names) == 2 else ""
        return f"chain rule{order} through " + ", ".join(f"${symbol}$" for symbol in through)

    def _spoken(self, argument: str) -> str:
        return self.reads[argument].symbol if argument in self.reads else argument

    @cached_property
    def _called(self) -> Names:
        return self.names or names_after(self.symbol)

    @cached_property
    def _named(self) -> _Named:
        return _Named(self)

    @cached_property
    def _whole(self) -> Composite:
        return Composite(self._named, self.reads)

    @cached_property
    def _made(self) -> dict[str, Matrix]:
        return {}

    @cached_property
    def _seen(self) -> dict[str, Operation]:
        return {}


@dataclass(frozen=True, eq=False)
class _Named:
    """A stage's operation in the stage's letters; its derivatives in other stages have names."""

    stage: Stage

    @cached_property
    def _operation(self) -> Lettered:
        return Lettered(self.stage.operation, self.stage.alphabet)

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
            J = self._operation.jacobian(name)
            if name in stage.reads:
                symbol = stage.reads[name].symbol
                reason = f"first derivative of ${stage.spoken}$ with respect to ${symbol}$: {_closed_form(stage)}"
                J = named(J, stage._called.slope(symbol), reason)
            self._made[name] = J
        return self._made[name]

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        key = name_i + "," + name_j
        if key not in self._made:
            stage = self.stage
            H = self._operation.hessian(name_i, name_j)
            if name_i in stage.reads or name_j in stage.reads:
                i, j = (stage.reads[n].symbol if n in stage.reads else stage.index(n) for n in (name_i, name_j))
                reason = f"second derivative of ${stage.spoken}$ with respect to ${i}$ and ${j}$: {_closed_form(stage)}"
                H = named(H, stage._called.curvature(i, j), reason)
            self._made[key] = H
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
        J, i = self.whole.jacobian(name), self._index(name)
        symbol = f"J_{{{self.stage.symbol} {i}}}" if name == self.cut.symbol else self.stage._called.first(i)
        return named(J, symbol, f"first derivative of ${self.stage.symbol}$ with respect to ${name}$: {self._rule()}")

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        H, i, j = self.whole.hessian(name_i, name_j), self._index(name_i), self._index(name_j)
        if self.cut.symbol in (name_i, name_j):
            symbol = f"H_{{{self.stage.symbol},{i} {j}}}"
        else:
            symbol = self.stage._called.second(i, j)
        rule = self._rule(" to second order")
        return named(H, symbol, f"second derivative of ${self.stage.symbol}$ with respect to ${name_i}$ and ${name_j}$: {rule}")

    def _rule(self, order: str = "") -> str:
        inner = [s for s in self.stage.reads.values() if s.depends_on(self.cut)]
        if self.cut in inner:
            return _closed_form(self.stage)
        return f"chain rule{order} through " + ", ".join(f"${s.symbol}$" for s in inner)


def total(symbol: str, left: Stage, right: Stage, *, names: Names | None = None, index: Callable[[str], str] = str) -> Stage:
    """Return the sum of two stages as one.

    A stage that both summands read is kept as one argument: the derivative of Y + FFN(Y) is (I + J) Y_k and not Y_k + J Y_k, as
    in the papers.
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


def _closed_form(stage: Stage) -> str:
    return "sum of the derivatives of its summands" if isinstance(stage.operation, Total) else f"closed form ({stage.chapter})"


def _slope(own: str, said: str) -> str:
    return f"first derivative of ${own}$ with respect to ${said}$"
