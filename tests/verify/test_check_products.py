"""check() where no matrix fits: products along directions on groups of parameters, and what is seen of an error."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_cases import RIGHT, draw
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.diagonal import CurvatureDiagonal
from hessiankit.verify import Problem
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import Layout, joined
from hessiankit.verify.probes import ALL_PARAMETERS, directions, roles
from hessiankit.verify.references import REFERENCES

IDS = torch.tensor([[1, 7, 3, 0], [5, 5, 29, 2]])
LABELS = torch.tensor([[2, 4, -100, 1], [0, 30, 3, 3]])


def model(d_model: int = 16, d_ff: int = 24, layers: int = 3, **options: Any) -> hk.Transformer:
    torch.manual_seed(0)
    return hk.Transformer(31, d_model, d_ff, layers, 2, activation="gelu", causal=True, bias=True, **options)


def checked(module: nn.Module | None = None, **options: Any) -> CheckReport:
    return hk.check(module or model(), IDS, LABELS, loss="cross_entropy", **options)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A smaller model of the same structure, which is compared by products as well."""
    monkeypatch.setattr(sys.modules["hessiankit.verify.check"], "PRODUCTS", 100)
    return model(4, 5, layers=2)


def test_a_model_of_thousands_of_parameters_passes_without_a_matrix() -> None:
    module = model(d_ff=40, layers=2, attention_bias=True)  # of which that of the keys has no effect but rounding
    before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in module.parameters()]
    report = checked(module)
    assert sum(p.numel() for p in module.parameters()) > 5000
    assert report, report
    assert report.max_rel_error < 1e-10
    assert {h.reference for h in report.health if h.healthy} == set(RIGHT)
    assert {row.name.partition(":")[0] for row in report.rows if row.of_same_call} == {"loss", "slope", "gradient", "diagonal"}
    assert all(
        (p.data_ptr(), p.dtype) == (at, dtype) and torch.equal(p, value)
        for p, (at, dtype, value) in zip(module.parameters(), before, strict=True)
    )


def test_it_prints_and_exports_without_a_matrix(small: nn.Module) -> None:
    report = checked(small, against=RIGHT[:2])
    assert "blocks.*.attention x all parameters" in report.table()
    assert "parameters, by products" in report.table()
    again = json.loads(json.dumps(report.to_dict()))
    assert (again["hessian"], again["passed"]) == (None, True)
    assert isinstance(report.closed_form, hk.HessianOperator)
    with pytest.raises(hk.InputError, match="were compared by products, without a matrix"):
        _ = report.hessian


def test_float32_has_its_own_tolerance(small: nn.Module) -> None:
    report = checked(small, dtype=None)
    assert report.rtol == 1e-3
    assert report, report
    assert report.max_rel_error > 1e-9


@pytest.mark.parametrize("part", ["embedding.W_E", "blocks.1.attention.W_K", "blocks.0.norm_1.bias"])
def test_one_wrong_row_of_one_parameter_is_seen(part: str, small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's products are off by 1e-6 in one row of one parameter, of one layer."""
    right = hk.HessianOperator._rows

    def wrong(self: hk.HessianOperator, rows: Tensor) -> Tensor:
        found = right(self, rows).clone()
        at = self.slices[part].start
        found[:, at : at + 3] *= 1 + 1e-6
        return found

    monkeypatch.setattr(hk.HessianOperator, "_rows", wrong)
    report = checked(small, against=RIGHT[:2])
    assert not report
    group = next(label for label, names in roles(dict(small.named_parameters())).items() if part in names)
    assert {row.name.partition(" x ")[0] for row in report.rows if not row.passed} == {group}
    assert all(h.healthy for h in report.health)


def test_a_wrong_gradient_and_a_wrong_diagonal_are_seen(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CurvatureDiagonal.flat
    monkeypatch.setattr(CurvatureDiagonal, "flat", property(lambda self: right.fget(self) * (1 + 1e-7)))
    init = hk.HessianOperator.__init__

    def wrong(self: hk.HessianOperator, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.gradient = self.gradient * (1 + 1e-7)

    monkeypatch.setattr(hk.HessianOperator, "__init__", wrong)
    report = checked(small, against=RIGHT[:2])
    assert {row.name.partition(":")[0] for row in report.rows if not row.passed} == {"gradient", "diagonal"}


def test_one_reference_is_not_enough_and_others_are_taken_by_name(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = checked(small, against=RIGHT[:1])
    assert f"NOT VERIFIED: {RIGHT[0]} alone, two independent ones are needed" in alone.verdict
    assert "UNHEALTHY" not in alone.table()
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    report = checked(small, against=[*RIGHT[:2], "torch.func.hessian", "curvlinops"])
    assert report, report
    health = {h.reference: h for h in report.health}
    assert health["curvlinops"].reason.startswith("unsupported: ")
    if not health["torch.func.hessian"].healthy:  # LayerNorm with a gain
        assert "known torch defect" in health["torch.func.hessian"].reason


def test_references_are_compared_along_every_direction(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward mode is wrong along directions on single groups, and right along the one on everything."""
    right = REFERENCES["jvp(grad)"]

    def wrong(problem: Problem, V: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None, str]:
        value, error, note = right.route(problem, V, *rest)
        return value if bool((V != 0).all()) else 1.1 * value, error, note

    monkeypatch.setitem(REFERENCES, "jvp(grad)", replace(right, route=wrong))
    report = checked(small)
    assert report.verdict.startswith("NOT VERIFIED")
    assert not any(h.healthy for h in report.health)


def test_directions_are_generic_and_of_unit_length() -> None:
    problem = Problem(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).double(), draw(5, 4), draw(5, 6))
    for direction in directions(roles(problem.params), 1, seed=0):
        v = direction.vector(problem)
        assert abs(float(v.norm()) - 1) < 1e-12
        for name, where in problem.slices.items():
            assert bool((v[where] != 0).all()) is (name in direction.names)


def test_of_several_directions_on_a_group_the_worst_counts() -> None:
    problem = Problem(nn.Linear(2, 1).double(), draw(3, 2), draw(3, 1))
    right, wrong = draw(1, 3), draw(1, 3) * torch.tensor([1.0, 1.0, 1.5])
    for pair in ((right, wrong), (wrong, right)):
        gaps = joined([Layout(problem, ["all"]).gaps(products, right) for products in pair])
        assert gaps.labels == ("all",)
        assert gaps.gap[:, 0].tolist() == [0.0, float((wrong - right)[0, 2].abs())]


def test_groups_are_roles_and_not_too_many() -> None:
    names = [f"h.{layer}.{part}.{kind}" for layer in range(5) for part in ("ln", "attn") for kind in ("weight", "bias")]
    assert list(roles([*names, "wte.weight"])) == ["h.*.ln", "h.*.attn", "wte"]
    assert list(roles([f"a{i}.b{j}.weight" for i in range(5) for j in range(5)])) == ["a0", "a1", "a2", "a3", "a4"]
    assert list(roles(f"p{i}" for i in range(30))) == [ALL_PARAMETERS]
    assert [d.label for d in directions({"a": ("x",), "b": ("y",)}, 2, 0)] == ["a", "a", "b", "b", ALL_PARAMETERS]
