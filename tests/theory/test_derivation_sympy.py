"""A derivation in SymPy: named assignments, functions in four languages, letters of numbers, matrix expressions of symbolic sizes."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import shutil
import subprocess

import numpy as np
import pytest
import sympy
import torch
from derivation_reference import assert_agree, generic

from derivations.operation import shape_of
from hessiankit import InputError, TransformerBlock, derive, hessian
from hessiankit.theory.formulas.chapters import CHAPTERS
from hessiankit.theory.formulas.code import identifier
from hessiankit.theory.formulas.traced import letter_of

X = torch.randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X3 = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def arguments(derivation, function):
    """The arrays of the derivation's point that a function takes, in its order."""
    subject = derivation._make_assignments.args[0]
    arrays = {identifier(subject.symbols[name]): array for name, array in subject.point.items()}
    return [arrays[name] for name, p in inspect.signature(function).parameters.items() if p.kind != p.KEYWORD_ONLY]


def test_a_block_that_plain_sympy_cannot_print_is_a_list_of_short_assignments():
    block = TransformerBlock(2, 2).double()
    derivation = derive(block, wrt=("query", "value"), inputs=X)
    listed = derivation.sympy()
    replacements, (matrix,) = listed
    known = {symbol for symbols in listed.inputs.values() for symbol in symbols} | set(listed.parameters)
    for name, meaning in replacements:  # each in what is known before it
        assert meaning.free_symbols <= known
        assert sympy.count_ops(meaning) < 20
        known.add(name)
    assert matrix.free_symbols <= known
    assert len(str(listed)) < 100_000
    (eps,) = (symbol for symbol in listed.parameters if "varepsilon" in symbol.name)
    assert listed.subs({eps: sympy.Rational(1, 100)}).parameters.keys() == listed.parameters.keys() - {eps}
    assert listed.count_ops() < 3000


def plain_operations(derivation):
    """Operations of SymPy's own second derivatives, entry by entry, after its search for common subexpressions."""
    subject, names, _, _ = derivation._make_assignments.args
    symbols = {}
    for name, array in subject.point.items():
        entries = [sympy.Symbol(f"{subject.symbols[name]}_{k}", real=True) for k in range(array.numel())]
        symbols[name] = np.array(entries, dtype=object).reshape(shape_of(array))
    value = subject.stage(symbols).value.reshape(-1)
    rows, columns = (symbols[name].reshape(-1) for name in names)
    reduced = sympy.cse([sympy.diff(sympy.diff(v, a), b) for v, a, b in itertools.product(value, rows, columns)])
    return sum(sympy.count_ops(e) for e in (*(meaning for _, meaning in reduced[0]), *reduced[1]))


@pytest.mark.parametrize(
    ("name", "wrt", "inputs"),
    [
        ("layernorm", ("X", "X"), X3),
        ("rmsnorm", ("X", "X"), X3),
        ("feedforward", ("W_1", "W_2"), X),
        ("attention", ("W_Q", "W_V"), X),
        pytest.param("feedforward", ("W_1", "W_1"), X, marks=pytest.mark.slow),
        pytest.param("attention", ("W_Q", "W_K"), X, marks=pytest.mark.slow),
    ],
)
def test_at_most_twice_the_operations_of_plain_sympy(name, wrt, inputs):
    derivation = derive(name, wrt=wrt, inputs=inputs)
    plain = plain_operations(derivation)
    assert 0 < derivation.sympy().count_ops() <= 2 * plain


@pytest.mark.parametrize("name", CHAPTERS)
def test_functions_have_the_numbers_of_the_formula(name):
    for wrt in [CHAPTERS[name].wrt, CHAPTERS[name].wrt[:1]]:
        derivation = derive(name, wrt=wrt, length=2)
        for lang in ("numpy", "torch"):
            function = derivation.function(lang)
            values = [array.numpy() if lang == "numpy" else array for array in arguments(derivation, function)]
            assert_agree(torch.as_tensor(function(*values)), derivation.dense())


@pytest.mark.parametrize("heads", [1, 2])
def test_functions_have_the_numbers_of_the_hessian(heads):
    """With two heads the block has logits T, which are no input."""
    torch.manual_seed(0)
    block = generic(TransformerBlock(2, 1, heads, d_k=1, placement="pre", norm="rmsnorm", activation="gelu").double())
    target = torch.randn(2, 2).double()
    names = ("attention.W_K", "attention.W_V")
    derivation = derive(block, wrt=names, inputs=X, target=target, loss="mse")
    assigned = [name for name, _ in derivation.sympy().replacements]
    assert len(set(assigned)) == len(assigned)  # a name has one meaning
    assert not {symbol for symbols in derivation.sympy().inputs.values() for symbol in symbols} & set(assigned)
    function = derivation.function("torch")
    arrays = {identifier(symbol): p.detach() for (_, p), symbol in zip(block.named_parameters(), letters(block), strict=True)}
    arrays |= {"X": X, "Target": target}
    found = function(**{name: arrays[name] for name in inspect.signature(function).parameters if name in arrays})
    expected = hessian(block, X[None], target[None], loss="mse").block(*names)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(2), torch.nn.RMSNorm(1, eps=1e-5)])
def test_a_norm_of_rows_that_move_along_themselves_has_the_numbers_of_the_hessian(norm):
    """The derivatives are small differences in 1/s - x^2/s^3, which at variances of 10^4 leave half of the digits."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, *norm.normalized_shape), norm).double()
    inputs, target = 100 * X3, torch.zeros(2, *norm.normalized_shape).double()
    derivation = derive(module, wrt=("0.weight", "0.weight"), inputs=inputs, target=target, loss="mse")
    function, arrays = derivation.function(), {"X": inputs, "Target": target}
    arrays |= {identifier(letter_of(name, p)): p.detach() for name, p in module.named_parameters()}
    found = function(**{name: arrays[name].numpy() for name in inspect.signature(function).parameters if name in arrays})
    expected = hessian(module, inputs, target, loss="mse").block(*derivation.wrt)
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-12 * expected.abs().max()


def letters(block):
    symbols = derive(block)._make_assignments.args[0].symbols
    return [symbols[name] for name, _ in block.named_parameters()]


def test_the_target_of_a_loss_has_letters_of_its_own():
    T, target = X3, X3.flip(0)
    derivation = derive("softmax", wrt=("T", "T"), inputs=T, loss="mse", target=target)
    assert_agree(derivation.function("torch")(T=T, Target=target), derivation.dense())


def test_torch_differentiates_the_function():
    """Along X, the derivative of the Jacobian with respect to gamma is the second derivative."""
    first, second = derive("rmsnorm", wrt="gamma", length=2), derive("rmsnorm", wrt=("gamma", "X"), length=2)
    function = first.function("torch")
    (point,) = arguments(first, function)
    slopes = torch.autograd.functional.jacobian(lambda x: function(x), point)
    assert_agree(slopes.reshape(second.shape), second.dense())


def test_c_compiles_and_agrees(tmp_path):
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    derivation = derive("layernorm", wrt=("X", "gamma"), length=2)
    source, library = tmp_path / "second.c", tmp_path / "second.so"
    source.write_text(derivation.function("c", "second"), encoding="utf-8")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    values = [array.numpy().copy() for array in arguments(derivation, derivation.function("numpy"))]
    out = np.full(derivation.shape, np.nan)
    doubles = ctypes.POINTER(ctypes.c_double)
    X, eps = values[0].ctypes.data_as(doubles), ctypes.c_double(1e-5)
    ctypes.CDLL(str(library)).second(X, eps, out.ctypes.data_as(doubles))
    assert_agree(torch.from_numpy(out), derivation.dense())


def test_julia_runs_and_agrees(tmp_path):
    source = derive("softmax", wrt="T", length=1).function("julia", "jacobian")
    assert source.startswith("function jacobian(T")
    julia = shutil.which("julia") or pytest.skip("no Julia")
    script = tmp_path / "jacobian.jl"
    script.write_text(source + "println(jacobian([0.0 0.0 0.0 0.0])[1, 1])\n", encoding="utf-8")
    assert float(subprocess.check_output([julia, script])) == pytest.approx(0.25 - 0.0625)


def test_numbers_are_letters_with_their_values():
    derivation = derive(torch.nn.LayerNorm(3, eps=0.25).double(), wrt="X", inputs=X3)
    listed, function = derivation.sympy(), derivation.function("torch")
    (eps,) = listed.parameters
    assert listed.parameters == {eps: 0.25}
    at = arguments(derivation, function)
    moved = derive(torch.nn.LayerNorm(3, eps=0.5).double(), wrt="X", inputs=X3)
    assert_agree(function(*at, varepsilon=0.5), moved.dense())
    assert_agree(listed.subs({eps: 0.5}).function("torch")(*at), moved.dense())
    step = 1e-4  # central differences have an error of its square
    slope = (function(*at, varepsilon=0.25 + step) - function(*at, varepsilon=0.25 - step)) / (2 * step)
    assert (listed.diff(eps).function("torch")(*at) - slope).abs().max() < 1e-6 * slope.abs().max()
    assert set(map(str, derive("attention").sympy().parameters)) == {"c"}
    leaky = derive(torch.nn.LeakyReLU(0.25), wrt="X", inputs=X3)
    assert list(leaky.sympy().parameters.values()) == [0.25]
    assert_agree(leaky.function("torch")(X3), leaky.dense())


def test_an_entry_in_full_has_the_symbols_of_the_inputs_alone():
    derivation = derive("layernorm", wrt=("X", "X"), inputs=X3)
    listed, entry = derivation.sympy(), derivation.expanded(0, 1)
    numbers = dict(zip(listed.inputs["X"], X3.reshape(-1).tolist(), strict=True))
    numbers |= dict(zip(listed.inputs[r"\gamma"], derivation._make_assignments.args[0].point["gamma"].tolist(), strict=True))
    assert entry.free_symbols <= {*numbers, *listed.parameters}
    assert float(entry.subs({**numbers, **listed.parameters})) == pytest.approx(float(derivation.dense()[0, 1]), rel=1e-11)


def test_an_unknown_language_is_refused():
    with pytest.raises(InputError, match=r"function: lang='fortran' is not known.*numpy, torch, c, julia"):
        derive("softmax").function("fortran")


# Matrix expressions ---------------------------------------------------------------------------------------------------------


def evaluate(derivation):
    """Put the sizes and the leaves of the point in, part by part, by SymPy's own printer of NumPy."""
    parts, result = derivation.matrix_expr(named=True)
    sizes = {sympy.Symbol(letter, integer=True, positive=True): n for letter, n in derivation.sizes.items()}
    known = {letter: array.numpy() for letter, array in derivation.leaves.items()}
    for symbol, expression in [*parts, (None, result)]:
        sized = expression.subs(sizes)
        letters = sorted(sized.atoms(sympy.MatrixSymbol), key=str)
        plain = {letter: sympy.MatrixSymbol(f"m{k}", *letter.shape) for k, letter in enumerate(letters)}
        function = sympy.lambdify(list(plain.values()), sized.xreplace(plain), "numpy")
        value = function(*(known[letter.name].reshape(letter.shape) for letter in letters))
        if symbol is None:
            return torch.as_tensor(value, dtype=torch.float64)
        known[symbol.name] = value


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_matrix_expression_of_a_chapter(name):
    chapter = CHAPTERS[name]
    for wrt in [(next(iter(chapter.shapes)),), *itertools.product(chapter.shapes, repeat=2)]:
        derivation = derive(name, wrt=wrt)
        assert_agree(evaluate(derivation), derivation.dense())


@pytest.mark.parametrize(
    "options", [{}, {"placement": "pre", "activation": "gelu"}, {"n_heads": 2, "placement": "hybridnorm", "norm": "rmsnorm"}]
)
def test_the_matrix_expression_of_a_block(options):
    derivation = derive(generic(TransformerBlock(4, 5, **options).double()))
    if options.get("n_heads", 1) == 1:
        assert_agree(evaluate(derivation), derivation.dense())
    sizes = {sympy.Symbol(letter, integer=True, positive=True): n for letter, n in derivation.sizes.items()}
    assert tuple(int(n.subs(sizes)) for n in derivation.matrix_expr().shape) == derivation.shape


def test_sizes_of_a_matrix_expression_are_letters():
    expression = derive("attention", wrt=("W_Q", "W_V")).matrix_expr()
    L, d, d_K, d_v = sympy.symbols("L d_V d_K d_v", integer=True, positive=True)
    assert expression.shape == (L * d_v * d * d_K, d * d_v)
    assert r"\otimes" in sympy.latex(expression)
    assert expression.subs({L: 2, d: 3, d_K: 4, d_v: 5}).shape == (120, 15)
