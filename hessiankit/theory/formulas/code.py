"""A list of assignments as a function of NumPy or torch, or as the source of one in C or Julia, by SymPy's printers."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from sympy.codegen.ast import (
    Assignment,
    CodeBlock,
    Declaration,
    FunctionDefinition,
    Pointer,
    Variable,
    float64,
    pointer_const,
    value_const,
)
from sympy.codegen.cnodes import void
from sympy.utilities.lambdify import MODULES

from hessiankit.support.errors import InputError


@dataclass(frozen=True)
class Program:
    """A list of assignments in names that are identifiers, with entries of matrices for the symbols of the inputs."""

    arrays: tuple[sympy.MatrixSymbol, ...]
    parameters: Mapping[sympy.Symbol, float]
    rows: tuple[tuple[sympy.Symbol, sympy.Expr], ...]
    results: tuple[sympy.Expr, ...]
    shape: tuple[int, int]


def program(
    replacements: Sequence[tuple[sympy.Symbol, sympy.Expr]],
    matrix: sympy.ImmutableDenseMatrix,
    inputs: Mapping[str, sympy.ImmutableDenseMatrix],
    parameters: Mapping[sympy.Symbol, float],
) -> Program:
    """Return assignments with identifiers, and with numbers of 17 digits for roots and pi: torch's functions take tensors alone.

    Inputs that do not occur are left out.
    """
    expressions = [*(meaning for _, meaning in replacements), *matrix]
    present = {symbol for expression in expressions for symbol in expression.free_symbols}
    names: dict[sympy.Basic, sympy.Expr] = {}
    words, arrays = set[str](), []

    def word_of(name: str) -> str:
        word = identifier(name)
        while word in words:
            word += "_"
        words.add(word)
        return word

    for letter, symbols in inputs.items():
        if not present.isdisjoint(symbols.free_symbols):
            array = sympy.MatrixSymbol(word_of(letter), *symbols.shape)
            arrays.append(array)
            names |= {symbols[index]: array[index] for index in np.ndindex(*symbols.shape)}
    constants = {part for e in expressions for part in e.atoms(sympy.Pow, sympy.Function, sympy.NumberSymbol) if part.is_number}
    names |= {part: sympy.N(part, 17) for part in constants}
    scalars = (*parameters, *(name for name, _ in replacements))
    names |= {symbol: sympy.Symbol(word_of(symbol.name), real=True) for symbol in scalars}
    numbers = {names[symbol]: value for symbol, value in parameters.items() if symbol in present}
    rows = tuple((names[name], meaning.xreplace(names)) for name, meaning in replacements)
    return Program(tuple(arrays), numbers, rows, tuple(entry.xreplace(names) for entry in matrix), matrix.shape)


def identifier(name: str) -> str:
    r"""Return the letters and digits of a name in LaTeX.

    >>> [identifier(name) for name in ("W_Q", r"\gamma_1", r"\hat{X}_{1,2}", r"\lambda", r"b_{\mathrm{a}}")]
    ['W_Q', 'gamma_1', 'hat_X_1_2', 'lambda_', 'b_a']
    """
    word = re.sub(r"[\W_]+", "_", name.replace(r"\mathrm", "")).strip("_")
    return f"{word}_" if keyword.iskeyword(word) else word


def _torch(code: Program, name: str) -> Callable[..., Any]:
    if "torch" not in MODULES:
        raise InputError(f"function: torch needs SymPy 1.14 or newer, this is {sympy.__version__}; pass lang='numpy'")
    return _python(code, name, [{"where": _where}, "torch"], _torch_tensor)


def _python(code: Program, name: str, modules: list[Any], join: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function of the inputs, parameters by keyword, whose results ``join`` joins."""
    # lambdify takes the list in place of a search for common subexpressions
    kernel = sympy.lambdify(
        [*code.arrays, *code.parameters], list(code.results), modules, cse=lambda _: (code.rows, code.results)
    )
    kind = inspect.Parameter
    signature = inspect.Signature(
        [
            *(kind(array.name, kind.POSITIONAL_OR_KEYWORD) for array in code.arrays),
            *(kind(symbol.name, kind.KEYWORD_ONLY, default=value) for symbol, value in code.parameters.items()),
        ]
    )

    def derivative(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        arrays = [values[array.name].reshape(array.shape) for array in code.arrays]
        return join(kernel, arrays, [values[symbol.name] for symbol in code.parameters]).reshape(code.shape)

    derivative.__signature__ = signature  # type: ignore[attr-defined]
    derivative.__name__ = derivative.__qualname__ = name
    derivative.__doc__ = f"Return the {code.shape[0]} x {code.shape[1]} derivative; arrays have the shapes of the derivation."
    return derivative


def _numpy_array(kernel: Callable[..., Any], arrays: list[Any], parameters: list[Any]) -> Any:
    return np.array(kernel(*arrays, *parameters), dtype=float)


def _torch_tensor(kernel: Callable[..., Any], arrays: list[Any], parameters: list[Any]) -> Any:
    like = arrays[0] if arrays else torch.zeros((), dtype=torch.float64, device="cpu")
    numbers = [torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in parameters]
    return torch.stack([torch.as_tensor(entry, dtype=like.dtype, device=like.device) for entry in kernel(*arrays, *numbers)])


def _where(condition: torch.Tensor, *branches: Any) -> torch.Tensor:
    """Return torch.where in double precision: of two Python numbers torch makes single precision."""
    true, false = (torch.as_tensor(branch, dtype=torch.float64, device=condition.device) for branch in branches)
    return torch.where(condition, true, false)


def _c(code: Program, name: str) -> str:
    out = sympy.MatrixSymbol("out", *code.shape)
    arguments = [
        *(Pointer(sympy.Symbol(array.name), type=float64, attrs=(value_const,)) for array in code.arrays),
        *(Variable(symbol, type=float64) for symbol in code.parameters),
        Pointer(sympy.Symbol("out"), type=float64, attrs=(pointer_const,)),
    ]
    rows = [Declaration(Variable(symbol, type=float64, value=meaning)) for symbol, meaning in code.rows]
    entries = [Assignment(out[index], entry) for index, entry in zip(np.ndindex(*code.shape), code.results, strict=True)]
    body = CodeBlock(*rows, *entries)
    return "#include <math.h>\n\n" + str(sympy.ccode(FunctionDefinition(void, name, arguments, body))) + "\n"


def _julia(code: Program, name: str) -> str:
    numbers = ", ".join(f"{symbol.name} = {value!r}" for symbol, value in code.parameters.items())
    head = f"function {name}({', '.join(array.name for array in code.arrays)}; {numbers})"
    rows = [sympy.julia_code(meaning, assign_to=symbol) for symbol, meaning in code.rows]
    result = sympy.julia_code(sympy.Matrix(*code.shape, code.results), assign_to="out")
    return "\n    ".join([head, *rows, result, "return out"]) + "\nend\n"


LANGUAGES: dict[str, Callable[[Program, str], Any]] = {
    "numpy": lambda code, name: _python(code, name, ["scipy", "numpy"], _numpy_array),
    "torch": _torch,
    "c": _c,
    "julia": _julia,
}
"""By their names: the function, or the source of one, that computes a list of assignments."""
