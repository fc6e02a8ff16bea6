"""The route table: what it says of torch is true, checked by hand-made routes, and the page in docs says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.routes import table
from benchmarks.routes.operations import OPERATIONS
from benchmarks.routes.table import (
    DISAGREE,
    PATH,
    RIGHT,
    ROUTES_OF,
    UNSUPPORTED,
    WRONG,
    distilled,
    load,
    routes,
)
from benchmarks.routes.torch_routes import ROUTES, Route, central_differences
from hessiankit.cli import program as exit_codes
from hessiankit.verify.check import REFERENCES_OF_BLOCKS
from hessiankit.verify.references import REFERENCES

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "routes.md"
REVERSE = ("grad twice", "jacrev(grad)", "autograd hessian")


CLOSED = {"layer_norm", "layer_norm (w.r.t. its input)", "rms_norm", "softmax", "matmul", "linear", "cross_entropy"}
RIGHT_BY_ALL = {"layer_norm (written out)", "attention (written out)", "(z - t).square().mean()", "matmul", "rms_norm"}
SOME = {
    "layer_norm", "rms_norm", "softmax", "matmul", "cross_entropy", "layer_norm (written out)", "weight_norm", "sdpa (default)",
    "group_norm (no gain)", "autograd.Function (once)", "batch_norm", "instance_norm", "scatter_reduce (prod)", "cholesky_inverse",
    "triangular_solve", "linalg.slogdet",
}  # fmt: skip
"""Operations of every kind of verdict; all of them are measured by -m exhaustive, and by whoever writes the table."""


@pytest.fixture(scope="module", params=[SOME, pytest.param(set(OPERATIONS), marks=pytest.mark.exhaustive)], ids=["some", "all"])
def measured(request):
    return routes([name for name in OPERATIONS if name in request.param])


def test_names_are_those_of_references_and_routes():
    assert set(ROUTES_OF) | {"central-differences"} == set(REFERENCES_OF_BLOCKS)
    assert set(REFERENCES_OF_BLOCKS) <= set(REFERENCES)
    assert {route for tried in ROUTES_OF.values() for route in tried} <= set(ROUTES)


def test_the_catalogue_is_tiny_double_and_generic():
    for name, operation in OPERATIONS.items():
        example = operation.example(0)
        assert 10 <= example.theta.numel() <= 40, name
        assert example.theta.dtype == torch.float64
        assert torch.equal(example.theta, operation.example(0).theta)
        assert not torch.equal(example.theta, operation.example(1).theta)
        moved = example(example.theta + torch.linspace(0.1, 0.5, len(example.theta), dtype=torch.float64))
        assert moved != example(example.theta), f"{name} does not use the parameters it is given"
        each = torch.stack([example(example.theta, torch.tensor(i)) for i in range(example.samples)])
        torch.testing.assert_close(each.mean(), example(example.theta), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["layer_norm", "sdpa (default)", "sdpa (math)"])
def test_operations_compute_what_torch_computes(name):
    twin = OPERATIONS["layer_norm (written out)" if name == "layer_norm" else "attention (written out)"].example(3)
    assert OPERATIONS[name].example(3)(twin.theta) == pytest.approx(twin(twin.theta).item(), rel=1e-13)


class Product:
    """x y^2 z, the mean of two samples: once and three times its half."""

    samples = 2

    def __call__(self, x, sample=None):
        product = x[0] * x[1] ** 2 * x[2]
        return product if sample is None else (0.5 + sample) * product


@pytest.mark.parametrize("route", ROUTES.values(), ids=list(ROUTES))
def test_every_route_on_a_function_with_a_hessian_known_by_hand(route):
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = route.matrix(Product(), x)
    expected = torch.tensor([[0.0, 12.0, 4.0], [12.0, 6.0, 4.0], [4.0, 4.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


DIFFERENCES = {
    "a gradient that drops a term has an asymmetric derivative": (
        lambda x: x[0] * x[1].detach() ** 2, [1.0, 2.0], [[0.0, 4.0], [0.0, 0.0]], 1e-11,
    ),
    "a first step over the kink of relu": (lambda x: (x[0].relu() * x[1]).square(), [1e-3, 2.0], [[8.0, 8e-3], [8e-3, 2e-6]], 1e-9),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_column_j_of_the_differences_is_the_derivative_along_parameter_j(name):
    f, x, expected, rtol = DIFFERENCES[name]
    found = central_differences(f, torch.tensor(x, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=1e-10)


def test_the_table_as_a_whole(measured):
    """The judges agree, right and wrong are far apart, and what is right by every route or never wrong."""
    names = {judged.operation for judged in measured.judgements}
    assert {judged.operation for judged in measured.judgements if judged.judge == "closed form"} >= CLOSED & names
    assert all(judged.disagreement is None or judged.disagreement < 1e-11 for judged in measured.judgements)
    assert max(cell.error for cell in measured.cells if cell.status == RIGHT) < 1e-11
    assert all(cell.error > 1e-7 for cell in measured.wrong)
    for operation in RIGHT_BY_ALL & names:
        assert {measured.cell(operation, route).status for route in ROUTES} == {RIGHT}, operation
    assert "central differences" in measured.never_wrong
    known = {"weight_norm", "autograd.Function (once)", "cdist"}  # cdist: in torch 2.15
    assert {cell.operation for cell in measured.wrong if cell.route in REVERSE} <= known
    known = {"scatter_reduce (prod)", "cholesky_inverse", "triangular_solve"}
    assert {cell.operation for cell in measured.wrong if cell.route in ("jvp(grad)", "jacfwd(grad)")} <= known


of_the_page = pytest.mark.skipif(
    torch.__version__.split("+")[0] != load()["torch"] or torch.version.cuda is not None,
    reason="the shipped table and its page are of another torch",
)


@of_the_page
@pytest.mark.exhaustive
def test_the_shipped_table_is_true():
    assert distilled(routes()) == json.loads(PATH.read_text(encoding="utf-8")), "run: python -m benchmarks routes --write"


def marked(page: Path, name: str) -> str:
    """The section of a page between the marks of its name."""
    return page.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip() + "\n"


def facts(page: str) -> list[str]:
    """What a page says of torch: rounding errors made equal, and without the column and remarks on who judges."""
    lines = []
    for line in page.splitlines():
        if line.startswith("|"):
            line = " | ".join(line.strip("| ").split(" | ")[:-1])
        line = re.sub(r"\b\de-\d\d\b|\bjudge\b", "right", line).replace("+cpu", "")
        lines.append(re.sub(r" \(judged by .*\)$", "", line))
    return lines


def rows_of(page: str) -> set[str]:
    """The rows of operations, without the numbers of the reasons at the end."""
    return {re.sub(r" ?\(\d+\)", "", line) for line in facts(page) if line.split(" | ")[0] in OPERATIONS}


@of_the_page
def test_the_page_in_docs_is_true(measured):
    page, found = marked(PAGE, "routes"), measured.markdown()
    command = "run: python -m benchmarks routes --page docs/routes.md"
    assert len(rows_of(found)) == len(measured.judgements)
    assert rows_of(found) <= rows_of(page), command
    assert len(measured.judgements) < len(OPERATIONS) or facts(page) == facts(found), command
    shown = set(marked(PAGE.parent / "concepts" / "wrong_second_derivatives.md", "wrong modes").splitlines())
    assert set(measured.wrong_markdown().splitlines()) <= shown, "run: python -m benchmarks routes --page docs/concepts/..."


def test_table_says_what_the_cells_say(measured):
    text, page = measured.table().partition("judge\n")[2], measured.markdown()
    assert torch.__version__ in measured.table()
    for row in measured.table_rows():
        line = next(line for line in text.splitlines() if line.strip().startswith(row[0] + "  "))
        assert all(cell in line for cell in row)
    wrong = sum(row.count(WRONG) for row in page.split("## Errors")[0].splitlines() if row.startswith("|"))
    assert wrong == len(measured.wrong)
    assert json.loads(json.dumps(measured.to_dict()))["cells"][0]["operation"] == "layer_norm"


@pytest.mark.parametrize(
    ("matrix", "status", "symmetric"),
    [
        (lambda f, x: 1.001 * central_differences(f, x), WRONG, True),
        (lambda f, x: central_differences(f, x).triu(), WRONG, False),
        (lambda f, x: torch.full((len(x), len(x)), torch.nan), WRONG, False),
        (lambda f, x: torch.autograd.grad(f(x), x), UNSUPPORTED, None),
    ],
    ids=["scaled", "half", "nan", "raises"],
)
def test_a_route_that_is_wrong_is_called_wrong(monkeypatch, matrix, status, symmetric):
    monkeypatch.setitem(ROUTES, "grad twice", Route("grad twice", "", whole=matrix))
    found = routes("gelu")
    cell = found.cell("gelu", "grad twice")
    assert (cell.status, cell.symmetric) == (status, symmetric)
    if symmetric:
        assert cell.error == pytest.approx(1e-3, rel=1e-6)
    assert ("grad twice" in found.never_wrong) == (status == UNSUPPORTED)
    assert "gelu" in next(line for line in found.table().splitlines() if line.startswith("grad twice:"))


def test_judges_that_differ_are_reported(monkeypatch):
    monkeypatch.setattr(table, "central_differences", lambda f, x: 1.5 * central_differences(f, x))
    found = routes("tanh")
    assert found.judgements[0].judge == DISAGREE
    assert found.judgements[0].disagreement == pytest.approx(1 / 3)


def test_command_line(tmp_path, capsys):
    page = tmp_path / "routes.md"
    page.write_text("# Routes\n<!-- routes -->\nold\n<!-- /routes -->\n", encoding="utf-8")
    operations = ["--operation", "relu", "--operation", "gelu (tanh)"]
    assert main(["routes", *operations, "--json", "-", "--page", str(page)]) == exit_codes.OK
    printed = capsys.readouterr()
    assert [j["operation"] for j in json.loads(printed.out)["judgements"]] == ["relu", "gelu (tanh)"]
    assert "gelu (tanh)" in printed.err
    assert page.read_text(encoding="utf-8").startswith("# Routes\n<!-- routes -->\n\nSecond derivatives in torch")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--operation", "layernorm"], "operation='layernorm' is not known; did you mean 'layer_norm'"),
        (["--write", "--operation", "tanh"], "--write takes all operations, --operation some of them"),
        (["--write", "--operators"], "--write takes all operations, --operators other ones"),
        (["--operators", "--operation", "layernorm"], "operator='layernorm' is not known; did you mean"),
        (["--page", "no/such/page.md"], "cannot read no/such/page.md: No such file or directory; name a page with such marks"),
    ],
)
def test_what_cannot_be_used_is_one_line(given, message, capsys):
    assert main(["routes", *given]) == exit_codes.USAGE
    seen = capsys.readouterr().err
    assert seen.startswith(f"benchmarks: routes: {message}")
    assert seen.count("\n") == 1
