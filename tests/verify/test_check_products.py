"""check() where no matrix fits: products along directions on groups of parameters, and what is seen of an error."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from reference_cases import RIGHT, draw, relative
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.diagonal import CurvatureDiagonal
from hessiankit.verify import REFERENCES, Problem, Unsupported
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.probes import EVERYTHING, MOST_GROUPS, directions, roles

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
    module = model(attention_bias=True)  # of which that of the keys has no effect but rounding
    before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in module.parameters()]
    report = checked(module)
    assert sum(p.numel() for p in module.parameters()) > 5000
    assert report, report
    assert report.max_rel_error < 1e-10
    assert {h.reference for h in report.health if h.healthy} == set(RIGHT)
    assert {row.name.partition(":")[0] for row in report.rows if row.of_same_call} == {"loss", "gradient", "diagonal"}
    assert all(
        (p.data_ptr(), p.dtype) == (at, dtype) and torch.equal(p, value)
        for p, (at, dtype, value) in zip(module.parameters(), before, strict=True)
    )


def test_it_prints_and_exports_without_a_matrix(small: nn.Module) -> None:
    report = checked(small, against=RIGHT[:2])
    text = report.table()
    assert "blocks.*.attention x all parameters" in text
    assert "parameters, by products" in text
    assert "on each of" in text.splitlines()[-1] or "on each of" in text.splitlines()[-2]
    assert report._repr_html_().startswith("<table><caption>PASSED")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["hessian"] is None
    assert again["passed"] is True
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


def test_one_reference_is_not_enough_and_one_without_products_is_named(small: nn.Module) -> None:
    alone = checked(small, against=RIGHT[:1])
    assert f"NOT VERIFIED: {RIGHT[0]} alone, two independent ones are needed" in alone.verdict
    assert "UNHEALTHY" not in alone.table()
    report = checked(small, against=[*RIGHT[:2], "curvlinops"])
    assert report, report
    assert next(h for h in report.health if h.reference == "curvlinops").reason.startswith("unsupported: it has no products by")
    with pytest.raises(Unsupported, match="it has no products by parameter"):
        REFERENCES["torch.func.hessian"].along(Problem(nn.Linear(4, 3).double(), draw(5, 4), draw(5, 3)))


@pytest.mark.parametrize("name", RIGHT)
def test_products_by_parameter_are_those_of_the_matrix(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    problem = Problem(module, draw(5, 4), draw(5, 3))
    H = hk.hessian(module, draw(5, 4), draw(5, 3)).matrix
    for direction in directions(roles(problem.params), 1, seed=0):
        v = direction.parts(problem.params)
        flat = torch.zeros_like(problem.theta)
        for n, x in v.items():
            flat[problem.slices[n]] = x.reshape(-1)
        assert abs(float(flat.norm()) - 1) < 1e-12
        with REFERENCES[name].along(problem) as product:
            found, error = product(v)
        Hv = torch.cat([x.reshape(-1) for x in found.values()])
        assert relative(Hv, H @ flat) < (1e-10 if name == "central-differences" else 1e-13)
        if error is not None:
            for n, where in problem.slices.items():
                assert float((Hv - H @ flat)[where].abs().max()) <= error[n]


def test_differences_by_parameter_shrink_their_step_at_a_kink() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    problem = Problem(module, draw(40, 4), draw(40, 3))
    v = directions(roles(problem.params), 1, seed=0)[-1].parts(problem.params)
    with REFERENCES["central-differences"].along(problem) as product, REFERENCES["reverse-over-reverse"].along(problem) as other:
        (found, error), (exact, _) = product(v), other(v)
    assert error is not None
    for n in found:
        assert float((found[n] - exact[n]).abs().max()) <= error[n] + 1e-14


def test_groups_are_roles_and_not_too_many() -> None:
    names = [f"h.{layer}.{part}.{kind}" for layer in range(5) for part in ("ln", "attn") for kind in ("weight", "bias")]
    assert list(roles([*names, "wte.weight"])) == ["h.*.ln", "h.*.attn", "wte"]
    many = [f"a{i}.b{j}.weight" for i in range(5) for j in range(5)]
    assert list(roles(many)) == ["a0", "a1", "a2", "a3", "a4"]
    assert list(roles(f"p{i}" for i in range(30))) == [EVERYTHING]
    assert len(roles(dict(model().named_parameters()))) <= MOST_GROUPS
    assert [d.label for d in directions({"a": ("x",), "b": ("y",)}, 2, 0)] == ["a", "a", "b", "b", EVERYTHING]
