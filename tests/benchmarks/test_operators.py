"""The audit of torch's database of operators: verdicts on a few of its entries, planted errors, and its command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.routes import operators as audit
from benchmarks.routes.operators import AUDITED, RAISED, REFUSED, RIGHT, ROUGH, SILENT, SKIPPED, OperatorTable, operators
from benchmarks.routes.torch_routes import ROUTES, Route
from hessiankit.cli import program as exit_codes
from hessiankit.support.errors import TraceError

pytestmark = pytest.mark.slow


def entries(table: OperatorTable) -> dict[str, dict[str, int]]:
    return {row.name: row.verdicts for row in table.rows}


def test_three_operators() -> None:
    """One that torch has right, one with kinks at zero among its samples, and one through which forward mode is wrong."""
    table = operators(["nn.functional.softplus", "linalg.norm", "scatter_reduce"])
    verdicts = entries(table)
    assert set(verdicts["nn.functional.softplus"]) <= {RIGHT, SKIPPED}
    assert verdicts["linalg.norm (subgradients_at_zero)"].get(ROUGH)
    assert not any(SILENT in row.verdicts or RAISED in row.verdicts for row in table.rows if row.name.startswith("scatter"))
    wrong = {row.name: row.wrong for row in table.rows if row.wrong}
    assert set(wrong) == {"scatter_reduce (prod)"}
    assert set(wrong["scatter_reduce (prod)"]) == set(AUDITED) - {"grad twice"}
    assert min(wrong["scatter_reduce (prod)"].values()) > 0.5


def doubled(hessian: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        found = hessian(*args)
        return type("Twice", (), {"matrix": 2 * found.matrix})

    return wrong


def refusing(*args: Any) -> Any:
    raise TraceError("hessian: no. 17 is refused")


def failing(*args: Any) -> Any:
    raise KeyError("x3")


@pytest.mark.parametrize(
    ("hessian", "verdict", "message"),
    [
        (doubled(audit.hessian), SILENT, None),
        (refusing, REFUSED, "hessian: no"),
        (failing, RAISED, "KeyError: NAME"),
    ],
    ids=["silent", "refused", "raw"],
)
def test_errors_of_hessiankit_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, hessian: Callable[..., Any], verdict: str, message: str | None
) -> None:
    monkeypatch.setattr(audit, "hessian", hessian)
    (row,) = operators(["sin"]).rows
    assert row.verdicts == {verdict: 1}
    assert list(row.messages) == ([] if message is None else [message])
    assert ("Silent errors of hessiankit: sin." in OperatorTable((row,), "", 0.0).markdown()) == (verdict == SILENT)


def test_a_wrong_route_of_torch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(f: Callable[[Tensor], Tensor], theta: Tensor) -> Callable[[Tensor], Tensor]:
        products = ROUTES["jvp(grad)"].products
        assert products is not None
        return lambda V: 1.001 * products(f, theta)(V)

    def missing(f: Callable[[Tensor], Tensor], theta: Tensor) -> Callable[[Tensor], Tensor]:
        raise NotImplementedError("no forward mode")

    monkeypatch.setitem(ROUTES, "grad twice", Route("grad twice", "", scaled))
    monkeypatch.setitem(ROUTES, "grad(jvp)", Route("grad(jvp)", "", missing))
    (row,) = operators(["sin"]).rows
    assert row.wrong == pytest.approx({"grad twice": 1e-3}, rel=1e-6)
    assert row.cells == ("sin", "1", "0.001", "right", "right", "no")


def test_the_command_writes_its_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, before = tmp_path / "page.md", torch.backends.flags_frozen()
    page.write_text(
        "# Page\n<!-- routes -->\nkept\n<!-- /routes -->\n<!-- operators -->\n<!-- /operators -->\n", encoding="utf-8"
    )
    chosen = [part for name in ("sin", "triangular_solve", "amax") for part in ("--operation", name)]
    assert main(["routes", "--operators", *chosen, "--page", str(page), "--json", "-"]) == exit_codes.OK
    printed = capsys.readouterr()
    assert {row["name"] for row in json.loads(printed.out)["rows"]} == {"sin", "triangular_solve", "amax"}
    written = page.read_text(encoding="utf-8")
    assert "kept" in written
    assert f"torch {torch.__version__}: 3 operators" in written
    assert "| triangular_solve |" in written
    assert "Silent errors of hessiankit: none." in written
    assert torch.backends.flags_frozen() == before  # importing torch's tests freezes its flags
