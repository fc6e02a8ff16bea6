r"""The user's module as stages: its trace, each application of a primitive by the chapter with its closed form.

Values are matrices of rows, whatever their axes: vec_r does not see a reshape. Transpositions, slices and other choices of
entries are kept as the positions that they take, and become one selection P_k where a chapter reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array, is_exact
from derivations.gains import HadamardAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt
from derivations.matrix import Commutation, Identity, Ones, kron, scaled
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed, Shape, Total, Variable, shape_of, size
from derivations.selection import Selection
from derivations.softmax import SoftmaxAt
from derivations.stage import Names, Stage, leaf, total
from hessiankit.primitives.activation import Activation
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.elementwise import KINDS, Elementwise
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.indexing import Concatenate, Select, Slice
from hessiankit.primitives.linear import Add, Expand, Linear, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.pooling import Mean, SumOver
from hessiankit.primitives.softmax import Softmax
from hessiankit.request.checks import check_tensors
from hessiankit.support.errors import InputError
from hessiankit.theory.formulas.block_at import causal_mask, norm_alphabet, norm_names, weighted_values
from hessiankit.theory.formulas.subject import Subject
from hessiankit.theory.formulas.symbols import EPSILON, SCALE, SLOPE, FactorAt, SizeName
from hessiankit.tracing.trace import Application, Trace, trace_module

FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "exp": sympy.exp,
    "log": sympy.log,
    "sqrt": sympy.sqrt,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "power": lambda x, p: x ** sympy.nsimplify(p),
    "sigmoid": lambda x: 1 / (1 + sympy.exp(-x)),
    "erf": sympy.erf,
    "sin": sympy.sin,
    "cos": sympy.cos,
}
"""Functions of one number in SymPy, by the kinds of ``Elementwise``."""


def elementwise(kind: str, constants: Sequence[Any], X: Array, slope: Any) -> Any:
    """Return the values of one of ``FUNCTIONS``, where X is no array of SymPy with the two derivatives."""
    if is_exact(X):
        return np.frompyfunc(lambda x: FUNCTIONS[kind](x, *constants), 1, 1)(X), None, None
    return KINDS[kind](X, *constants)


@dataclass(frozen=True)
class Entries:
    """Entries of a stage, as an array of some shape."""

    stage: Stage
    shape: Shape
    positions: Tensor | None = None  # of the entries, in the order of vec_r; None for all in their order


def of_trace(module: nn.Module, inputs: Any) -> Subject:
    """Return the user's module as a subject, at its parameters and on the first tensor of floating point of its inputs."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise InputError(
            f"derive: {type(module).__name__} as it is set has no closed form by itself, and its trace needs inputs; "
            "pass inputs=X, a tuple of arguments or a dict of keyword arguments"
        )
    if isinstance(module, nn.MultiheadAttention) and len(args) == 1:
        args, kwargs = args * 3, {"need_weights": False}
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    if parameters:
        check_tensors(module, parameters, one_dtype=True)
    X = tensors[0].detach().to(next(iter(parameters.values()), tensors[0]))

    def call(moving: Mapping[str, Tensor]) -> Tensor:
        own = {name: value for name, value in moving.items() if name != "X"}
        own_args, own_kwargs = pytree.tree_map(lambda x: moving["X"] if x is tensors[0] else x, (args, kwargs))
        output: Any = torch.func.functional_call(module, own, own_args, own_kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output  # such as hidden states and attention weights

    trace = trace_module(call, {**parameters, "X": X}, ())
    symbols = {name: letter_of(name, value) for name, value in parameters.items()} | {"X": "X"}
    point, letters = {**parameters, "X": X.reshape(-1, X.shape[-1])}, letters_of_numbers(trace)

    def stage(point: Mapping[str, Array]) -> Stage:
        return _Stages(trace, letters, symbols, point).output()

    numbers, title = {symbol: value for (_, value), symbol in letters.items()}, f"of {type(module).__name__}"
    wrt = (next(iter(symbols)),)
    return Subject(point, symbols, wrt, stage, lambda: (stage(point), SizeName({})), title=title, numbers=numbers)


def letter_of(dotted: str, value: Tensor) -> str:
    r"""Return the letter of a parameter: W for a matrix, gamma for a gain, b for a bias, with its place in the module as index.

    >>> letter_of("0.weight", torch.ones(2, 2)), letter_of("self_attn.in_proj_bias", torch.ones(2))
    ('W_{0}', 'b_{\\mathrm{self-attn.in-proj}}')
    """
    path, _, last = dotted.rpartition(".")
    kind = "W" if value.ndim > 1 else "b" if "bias" in last else r"\gamma"
    place = ".".join(part for part in (path, re.sub("_?(weight|bias)$", "", last)) if part).replace("_", "-")
    index = place if place.isdigit() else rf"\mathrm{{{place}}}"
    return f"{kind}_{{{index}}}" if place else kind


def letters_of_numbers(trace: Trace) -> dict[tuple[str, float], sympy.Symbol]:
    """Return the letters of numbers by kind and value: eps of norms, factors of logits, slopes."""
    roots = {a.inputs[0] for a in trace.applications if getattr(a.primitive, "kind", "") == "rsqrt"}
    pairs = []
    for a in trace.applications:
        match a.primitive:
            case LayerNorm(eps=float(value)) | RMSNorm(eps=float(value)):
                pairs.append((EPSILON.name, value))
            case Shift(c=value) if a.output in roots:
                pairs.append((EPSILON.name, value))
            case ScaledDotProductAttention():
                pairs.append((SCALE.name, logits_factor(a.primitive, trace.values[a.inputs[0] or 0].shape[-1])))
            case Activation(kind="leaky_relu", negative_slope=value):
                pairs.append((SLOPE.name, value))
    kinds, letters = [kind for kind, _ in dict.fromkeys(pairs)], dict[tuple[str, float], sympy.Symbol]()
    for kind, value in dict.fromkeys(pairs):
        k = 1 + sum(name == kind for name, _ in letters)
        letters[kind, value] = sympy.Symbol(kind if kinds.count(kind) == 1 else f"{kind}_{k}", positive=True)
    return letters


def logits_factor(attention: ScaledDotProductAttention, width: int) -> float:
    """Return the factor of the logits of queries of some width."""
    return float(width**-0.5 if attention.scale is None else attention.scale)


def rows_of(shape: Sequence[int]) -> Shape:
    """Return the shape of an array as a matrix of rows."""
    return prod(shape[:-1]), shape[-1] if shape else 1


class _Stages:
    """The stages of a trace, in the order in which they are made."""

    def __init__(
        self,
        trace: Trace,
        numbers: Mapping[tuple[str, float], sympy.Symbol],
        symbols: Mapping[str, str],
        point: Mapping[str, Array],
    ) -> None:
        self.trace, self.numbers, self.exact = trace, numbers, is_exact(point["X"])
        self.count, self.matrices = 0, dict[tuple[Any, ...], Stage]()
        leaves = {at: leaf(symbols[name], point[name]) for name, at in trace.parameters.items()}
        self.values = {at: Entries(stage, tuple(trace.values[at].shape)) for at, stage in leaves.items()}

    def output(self) -> Stage:
        """Return the output as a stage called Z."""
        makers = {a.output: a for a in self.trace.applications}
        top = self.trace.output
        while isinstance(makers[top].primitive, (Reshape, Cast)):
            (top,) = makers[top].inputs  # type: ignore[assignment]
        for a in self.trace.applications:
            stages = {id(value.stage) for value in self.values.values()}
            self.symbol = "Z" if a.output == top else f"Y^{{({self.count + 1})}}"
            self.values[a.output] = self.apply(a, tuple(self.trace.values[a.output].shape))
            self.count += id(self.values[a.output].stage) not in stages
        return self.matrix(self.values[self.trace.output], "Z")

    def apply(self, a: Application, shape: Shape) -> Entries:
        """Return the output of one application."""
        x, *others = (self.value(at) for at in a.inputs if at is not None)

        def unary(operation: Callable[..., Operation], prefix: str, suffix: str = "", argument: str = "X") -> Entries:
            X = self.matrix(x)
            return self.stage(operation(**{argument: X.value}), {argument: X}, prefix + X.symbol + suffix, shape)

        match a.primitive:
            case Reshape() | Cast():
                return Entries(x.stage, shape, x.positions)
            case Permute() | Select() | Slice() | Expand():
                return self.selection(x, a.primitive.value)
            case Linear():
                X, W = self.matrix(x), self.matrix(others[0])
                bias = {"b": others[1].stage} if len(others) == 2 else {}
                transposed = self.transpose(W)
                at: Operation = AffineAt(X.value, transposed.value, *(b.value for b in bias.values()))
                rule = rf"{X.symbol}\,{transposed.symbol}" + "".join(rf" + \mathbf{{1}}\,{b.symbol}^\top" for b in bias.values())
                return self.stage(at, {"X": X, "W": transposed, **bias}, rule, shape)
            case MatMul():
                P, R = self.matrix(x), self.matrix(others[0])
                if len(others[0].shape) == 2:
                    return self.stage(AffineAt(P.value, R.value), {"X": P, "W": R}, rf"{P.symbol}\,{R.symbol}", shape)
                at = HeadProductAt(P.value, R.value, prod(x.shape[:-2]), "mix")
                return self.stage(at, {"P": P, "R": R}, rf"{P.symbol}{R.symbol}\text{{ for each head}}", shape)
            case Add(alpha=alpha):
                left, right = (self.matrix(self.selection(t, lambda entries: entries.expand(shape))) for t in (x, others[0]))
                if alpha != 1:
                    rule = rf"{alpha:.6g}\,{right.symbol}"
                    factor = FactorAt(right.value, alpha)
                    right = self.matrix(self.stage(factor, {"X": right}, rule, shape, symbol=f"B^{{({self.count + 1})}}"))
                return Entries(total(self.symbol, left, right), shape)
            case Multiple(c=c):
                return unary(partial(FactorAt, c=c), rf"{c:.6g}\,")
            case Shift(c=c):
                number = self.number(EPSILON.name, c)
                return unary(partial(FactorAt, c=1, shift=number), "", f" + {sympy.latex(number)}")
            case Multiply():
                X, Y = (self.matrix(self.selection(t, lambda entries: entries.expand(shape))) for t in (x, others[0]))
                return self.stage(HadamardAt(X.value, Y.value), {"X": X, "Y": Y}, rf"{X.symbol}\odot {Y.symbol}", shape)
            case Activation(kind=kind, negative_slope=slope):
                slope = self.number(SLOPE.name, slope)
                return unary(partial(ActivationAt, kind, negative_slope=slope), rf"\mathrm{{{kind.replace('_', '-')}}}(", ")")
            case Elementwise(kind=kind, constants=constants) if kind in FUNCTIONS:
                return unary(partial(ActivationAt, partial(elementwise, kind, constants)), rf"\mathrm{{{kind}}}(", ")")
            case LayerNorm(dims=1, eps=float(eps)) | RMSNorm(dims=1, eps=float(eps)):
                return self.norm(type(a.primitive), x, others, self.number(EPSILON.name, eps))
            case Softmax(dim=dim) if dim in (-1, len(shape) - 1):
                return unary(SoftmaxAt, r"\mathrm{softmax}(", r")\text{ by rows}", "T")
            case ScaledDotProductAttention() if len(others) == 2:
                return self.attention(a.primitive, x, *others, shape=shape)
            case Mean(dims=dims) | SumOver(dims=dims):
                return self.sum_over(x, [dim % len(x.shape) for dim in dims], shape, mean=isinstance(a.primitive, Mean))
            case Concatenate(dim=dim):
                return self.concatenation([x, *others], dim, shape)
        kind = getattr(a.primitive, "kind", type(a.primitive).__name__)
        todo = "write it in operations that have one, or call eval() on a module with dropout"
        raise InputError(f"derive: {a.name} ({kind}) has no chapter as it is used here; {todo}")

    def norm(self, kind: type, x: Entries, parameters: Sequence[Entries], eps: Any) -> Entries:
        """Return the rows of a matrix after LayerNorm or RMSNorm, with its gain and shift."""
        X, chapter = self.matrix(x), LayerNormAt if kind is LayerNorm else RMSNormAt
        reads = {name: t.stage for name, t in zip(("gamma", "beta"), parameters, strict=False)}
        at = chapter(X.value, **{name: stage.value for name, stage in reads.items()}, eps=eps)
        gain = reads["gamma"].symbol if "gamma" in reads else r"\gamma"
        letters, names = norm_alphabet(self.symbol, X.symbol, gain), norm_names(self.symbol, X.symbol)
        rule = rf"\mathrm{{{kind.__name__}}}({X.symbol})"
        return self.stage(at, {"X": X, **reads}, rule, x.shape, letters=letters, names=names)

    def sum_over(self, x: Entries, dims: Sequence[int], shape: Shape, *, mean: bool) -> Entries:
        """Return the sum or the mean over some axes."""
        order = [*(k for k in range(len(x.shape)) if k not in dims), *dims]
        X, n = self.matrix(self.selection(x, lambda entries: entries.permute(order))), prod(x.shape) // prod(shape)
        matrix = scaled(Fraction(1, n if mean else 1), kron(Identity(prod(shape)), Ones(1, n)))
        rule = rf"\text{{{'mean' if mean else 'sum'} of entries of }}{X.symbol}"
        return self.stage(LinearMapAt(X.value, matrix, rows_of(shape)), {"X": X}, rule, shape)

    def concatenation(self, parts: Sequence[Entries], dim: int, shape: Shape) -> Entries:
        """Return arrays joined along an axis: the sum of the arrays, each at its places."""
        n, stages = prod(shape), [self.matrix(part) for part in parts]
        places = torch.arange(n, device="cpu").reshape(shape).split([part.shape[dim] for part in parts], dim)
        maps = []
        for X, place in zip(stages, places, strict=True):
            selection = Selection(place.reshape(-1).tolist(), n, f"P_{{{X.symbol}}}")
            maps.append(Renamed(LinearMapAt(X.value, selection.T, rows_of(shape)), {"X": X.symbol}))
        rule = r"\text{side by side: }" + r",\ ".join(X.symbol for X in stages)
        return self.stage(Total(*maps), {X.symbol: X for X in stages}, rule, shape)

    def attention(self, attention: ScaledDotProductAttention, *parts: Entries, shape: Shape) -> Entries:
        """Return softmax(c Q K^T) V, head by head."""
        q, k, v = parts
        if attention.enable_gqa and q.shape[-3] != k.shape[-3]:
            repeat = q.shape[-3] // k.shape[-3]
            k, v = (self.selection(t, lambda entries: entries.repeat_interleave(repeat, -3)) for t in (k, v))
        heads, (L, S) = prod(q.shape[:-2]), (q.shape[-2], k.shape[-2])
        mask = attention.mask
        if attention.is_causal:
            mask = causal_mask(max(L, S), 1)[:L, :S]
        mask = None if mask is None else mask.expand(*q.shape[:-2], L, S).reshape(-1, S)
        c = logits_factor(attention, q.shape[-1])
        usual = not self.exact and c == q.shape[-1] ** -0.5  # prints as the root
        scale = None if usual else self.number(SCALE.name, c)
        allowed: Array = mask.cpu().numpy() if self.exact and mask is not None else mask

        def stage(symbol: str, at: Operation, reads: Mapping[str, Stage], rule: str) -> Stage:
            return self.stage(at, reads, rule, shape_of(at.value), symbol=symbol).stage

        symbols = (f"T^{{({self.count + 1})}}", f"A^{{({self.count + 1})}}", self.symbol)
        return Entries(weighted_values(stage, symbols, [self.matrix(t) for t in (q, k, v)], heads, scale, allowed), shape)

    def stage(
        self,
        at: Operation,
        reads: Mapping[str, Stage],
        rule: str,
        shape: Shape,
        *,
        letters: Mapping[str, str] | None = None,
        names: Names | None = None,
        symbol: str | None = None,
    ) -> Entries:
        """Return a new stage; parameters that it reads are arguments under their own letters."""
        symbols = [stage.symbol for stage in reads.values()]
        parameter_symbols = {
            name: s.symbol for name, s in reads.items() if isinstance(s.operation, Variable) and symbols.count(s.symbol) == 1
        }
        operation = Renamed(at, parameter_symbols) if parameter_symbols else at
        alphabet = {**{name: stage.symbol for name, stage in reads.items()}, **(letters or {})}
        inner = {name: stage for name, stage in reads.items() if name not in parameter_symbols}
        return Entries(Stage(symbol or self.symbol, operation, inner, alphabet, rule, names), shape)

    def selection(self, x: Entries, choice: Callable[[Tensor], Tensor]) -> Entries:
        """Return entries of an array as ``choice`` takes them from it."""
        positions = torch.arange(prod(x.shape), device="cpu") if x.positions is None else x.positions
        chosen_positions = choice(positions.double().reshape(x.shape))
        chosen, identity = chosen_positions.long().reshape(-1), torch.arange(size(shape_of(x.stage.value)), device="cpu")
        return Entries(x.stage, tuple(chosen_positions.shape), None if torch.equal(chosen, identity) else chosen)

    def matrix(self, x: Entries, symbol: str | None = None) -> Stage:
        """Return entries as a stage whose value is a matrix of rows, under a symbol of its own where it is a new one."""
        shape = shape_of(x.stage.value) if x.positions is None and len(x.shape) < 2 else rows_of(x.shape)
        if x.positions is None and shape_of(x.stage.value) == shape:
            return x.stage
        key = (id(x.stage), shape, None if x.positions is None else tuple(x.positions.tolist()))
        if key not in self.matrices:
            n, k = size(shape_of(x.stage.value)), len(self.matrices) + 1
            matrix = Identity(n) if x.positions is None else Selection(x.positions.tolist(), n, f"P_{{{k}}}")
            rule = rf"\text{{entries of }}{x.stage.symbol}\text{{, vec}}_r = P_{{{k}}}\text{{vec}}_r"
            linear_map = LinearMapAt(x.stage.value, matrix, shape)
            self.matrices[key] = Stage(symbol or f"X^{{({k})}}", linear_map, {"X": x.stage}, {"X": x.stage.symbol}, rule)
        return self.matrices[key]

    def transpose(self, W: Stage) -> Stage:
        """Return the transpose of a matrix."""
        key = (id(W), "transposed")
        if key not in self.matrices:
            rows, columns = shape_of(W.value)
            linear_map = LinearMapAt(W.value, Commutation(columns, rows), (columns, rows))
            self.matrices[key] = Stage(rf"{W.symbol}^\top", linear_map, {"X": W}, {"X": W.symbol})
        return self.matrices[key]

    def value(self, at: int) -> Entries:
        """Return a value of the trace; one that does not depend on the parameters is a constant."""
        if at not in self.values:
            value = self.trace.values[at]
            array: Array = value.double().reshape(rows_of(value.shape))
            if self.exact:
                array = np.vectorize(sympy.Float, otypes=[object])(array.cpu().numpy())
            self.values[at] = Entries(leaf(f"C^{{({at})}}", array), tuple(value.shape))
        return self.values[at]

    def number(self, kind: str, value: float) -> Any:
        """Return a number, or in exact arithmetic its letter, or the rational number where it has none."""
        return self.numbers.get((kind, value), sympy.nsimplify(value)) if self.exact else value
