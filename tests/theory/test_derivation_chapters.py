"""``derive`` of chapters, of modules and of theorems: at unequal sizes, against a forward written out by hand, differentiated twice."""

from __future__ import annotations

import itertools
import pickle
import re

import pytest
import torch
from second_order_reference import derivatives
from torch import nn
from transformer_reference import ACTIVATIONS, attention, feedforward, normalised

from derivations.matrix import Named, definitions, dimensions
from hessiankit import derive
from hessiankit.theory.formulas.chapters import CHAPTERS, PRIMES, SMALL, drawn
from hessiankit.theory.formulas.symbols import SizeName
from hessiankit.theory.formulas.theorems import QKV, THEOREMS, find, ids
from papers import claims

EPS = 1e-5
OTHER = dict(zip(PRIMES, (11, 29, 13, 13, 5, 7, 31, 37, 41, 17, 19, 23), strict=True))


FORWARD = {
    "linear": lambda X, W, b: X @ W + b,
    "layernorm": lambda X, gamma, beta: normalised(X, EPS) * gamma + beta,
    "rmsnorm": lambda X, gamma: normalised(X, EPS, "rmsnorm") * gamma,
    "groupnorm": lambda X, gamma, beta: normalised(X.reshape(len(X), SMALL["g"], -1), EPS).reshape(X.shape) * gamma + beta,
    "layernorm-paper": normalised,
    "softmax": lambda T: T.exp() / T.exp().sum(1, keepdim=True),
    "attention": attention,
    "feedforward": lambda Y, W_1, W_2: feedforward(Y, W_1, W_2, kind="gelu", residual=False),
    "activation": lambda X: ACTIVATIONS["gelu"](X),
    "gain": lambda X, v: X * v,
    "hadamard": lambda X, Y: X * Y,
    "mse": lambda Z: Z.square().mean(),
    "cross_entropy": lambda Z: (Z.exp().sum(1).log() - Z.diagonal()).mean(),
    "embedding": lambda E: E[[1, 3, 5]],
    "mean-pool-head": lambda Z, W_c, b_c: Z.mean(0) @ W_c + b_c,
}


def point_of(name, extra=()):
    """The parameters that ``derive(name)`` draws: by the same generator, then the input by its own."""
    chapter = CHAPTERS[name]
    shapes = {**chapter.shapes, **{arg: chapter.extra[arg] for arg in extra}}
    point = drawn(shapes, {**SMALL, "L": 3}, 0)
    first = next(iter(point))
    if name != "embedding":
        point[first] = torch.randn(point[first].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return point


def close(found, expected):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-10 * max(float(expected.abs().max()), 1e-3)


def expected_of(forward, point):
    """(names) -> the Jacobian for one name, the second derivative for two, reverse over reverse."""
    jacobians, hessians = derivatives(forward, point)
    return lambda *names: jacobians[names[0]] if len(names) == 1 else hessians[names]


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_formula_is_the_derivative(name):
    """The target of ``derive("mse")`` is zero, the label of row i of ``derive("cross_entropy")`` is i."""
    expected = expected_of(FORWARD[name], point_of(name))
    for wrt in (*((arg,) for arg in CHAPTERS[name].shapes), *itertools.product(CHAPTERS[name].shapes, repeat=2)):
        close(derive(name, wrt=wrt).dense(), expected(*wrt))


def test_an_argument_that_is_asked_for_is_there():
    expected = expected_of(attention, point_of("attention", ("W_O",)))
    for wrt in itertools.product(("X", "W_Q", "W_V", "W_O"), ("W_O", "W_K")):
        if "W_O" in wrt:
            close(derive("attention", wrt=wrt).dense(), expected(*wrt))


@pytest.mark.parametrize("name", CHAPTERS)
def test_what_is_printed_does_not_depend_on_the_sizes(name):
    """Printed by name, the formula at other sizes is the same text: none of its letters is a size by accident."""
    chapter = CHAPTERS[name]
    axes = dict.fromkeys(" ".join(sum(chapter.shapes.values(), ())).split())
    options = {**chapter.options, **({"groups": OTHER["g"]} if "groups" in chapter.options else {})}
    if name == "embedding":
        options["tokens"] = [0] * OTHER["L"]
    other = type(chapter)(**{**vars(chapter), "options": options})
    for wrt in [(next(iter(chapter.shapes)),), *itertools.product(chapter.shapes, repeat=2)]:
        lines = derive(name, wrt=wrt).story.rows
        symbols = [chapter.letters.get(arg, arg) for arg in wrt]
        Z = other.subject("", drawn(chapter.shapes, OTHER, 1), 1).stage(drawn(chapter.shapes, OTHER, 1))
        matrix = Z.jacobian(*symbols) if len(symbols) == 1 else Z.hessian(*symbols)
        matrix = matrix.matrix if isinstance(matrix, Named) else matrix
        with dimensions(SizeName({letter: OTHER[letter] for letter in ("L", *axes)})):
            assert [matrix.latex(), *(d.matrix.latex() for d in definitions(matrix))] == [formula for _, formula in lines]


MODULES = [
    (nn.Linear(4, 3), ("X", "weight")), (nn.Linear(4, 3, bias=False), "X"), (nn.LayerNorm(4), ("X", "X")), (nn.LayerNorm(4, elementwise_affine=False), "X"),
    (nn.RMSNorm(4), ("weight", "X")), (nn.Softmax(-1), "T"), (nn.GELU("tanh"), ("X", "X")), (nn.SiLU(), "X"), (nn.LeakyReLU(0.3), "X"), (nn.Tanh(), ("X", "X")), (nn.Embedding(6, 2), "weight"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "wrt"), MODULES, ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None
)
def test_a_module_at_its_own_parameters(module, wrt):
    torch.manual_seed(1)
    module = module.double()
    for p in module.parameters():
        nn.init.normal_(p)
    X = torch.randint(6, (3,)) if isinstance(module, nn.Embedding) else torch.randn(3, 4).double()
    found = derive(module, wrt=wrt, inputs=X).dense()
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def forward(weight=None, **input):
        own = dict(weights)
        if weight is not None:
            own["weight"] = weight.T if isinstance(module, nn.Linear) else weight
        return torch.func.functional_call(module, own, tuple(input.values()) or (X,))

    names = (wrt,) if isinstance(wrt, str) else wrt
    weight = weights.get("weight", torch.zeros(0))
    point = {"weight": weight.T.clone() if isinstance(module, nn.Linear) else weight} if "weight" in weights else {}
    letter = next((name for name in names if name != "weight"), None)
    point |= {} if letter is None else {letter: X}
    close(found, expected_of(forward, point)(*names))


def test_the_padding_of_an_embedding_has_no_derivative():
    table, ids = nn.Embedding(6, 2, padding_idx=-3).double(), torch.tensor([3, 5, 3, 0])
    reference = torch.autograd.functional.jacobian(lambda E: nn.functional.embedding(ids, E, 3), table.weight.detach())
    found = derive(table, wrt="weight", inputs=ids)
    close(found.dense(), reference.reshape(8, 12))
    assert ("k", r"0\text{ at row }3\text{, which has no gradient, }1\text{ elsewhere}") in found.story.values
    close(torch.tensor(found.sympy().matrix.tolist(), dtype=torch.float64), reference.reshape(8, 12))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("activation", {}),
        ("embedding", {}),
        ("curvature-gap/thm3", {}),
    ],
)
def test_a_derivation_is_pickled(what, options):
    found = derive(what, **options)
    again = pickle.loads(pickle.dumps(found))
    assert (str(again), again.latex()) == (str(found), found.latex())
    assert torch.equal(again.dense(), found.dense())
    assert again.shape[0] * again.shape[1] > 200 or again.sympy() == found.sympy()


def test_a_loss_at_a_target():
    torch.manual_seed(2)
    Z, T, labels = torch.randn(3, 4).double(), torch.randn(3, 4).double(), torch.tensor([3, 0, 1])
    for module, name, target in ((nn.MSELoss(), "mse", T), (nn.CrossEntropyLoss(), "cross_entropy", labels)):
        expected = expected_of(lambda Z, module=module, target=target: module(Z, target), {"Z": Z})
        for wrt, what in itertools.product((("Z",), ("Z", "Z")), (module, name)):
            close(derive(what, wrt=wrt, inputs=Z, target=target).dense(), expected(*wrt))
    assert derive("mse", wrt="Z", inputs=Z, target=T).sympy().shape == (1, 12)


@pytest.mark.parametrize("asked", ids())
def test_a_theorem_names_rows_of_the_ledger(asked):
    paper, row = find(asked)
    rows = {row.id: row for row in claims(paper=paper)}
    assert set(row.ids(paper)) <= set(rows)
    found = derive(asked)
    if letters := re.search(r"(?:_|-w)(\w+)$", asked):  # phi_qk, g_k, xi_12, b2-wq
        assert row.wrt == tuple(f"W_{letter.upper()}" for letter in letters[1])
    assert (row.chapter == QKV) == (r"\partial S}" in found.latex())  # HybridNorm's are of the attention S alone
    assert found.claims == row.ids(paper)
    assert found.dense().shape == found.shape
    assert len(found.latex(document=True)) > 200
    assert all(find(f"{paper}/{name}") for name in row.claims)


def test_theorem_3_by_each_of_its_names():
    formulas = {derive(f"curvature-gap/{name}").latex() for name in ("thm3", "Theorem 3", "theorem3", "thm3-full", "THM3-DD")}
    assert len(formulas) == 1


def test_the_blocks_of_a_theorem_are_those_of_autograd():
    for paper, rows in THEOREMS.items():
        for name, row in rows.items():
            if row.chapter in CHAPTERS:
                expected = expected_of(FORWARD[row.chapter], point_of(row.chapter, row.given))
                close(derive(f"{paper}/{name}").dense(), expected(*row.wrt))
