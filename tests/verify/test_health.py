"""The instrument itself: it must see the known defect, and every error planted in any block."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_cases import RIGHT, HandWrittenNorm, draw
from torch import nn

import hessiankit as hk
from benchmarks.routes.operations import OPERATIONS
from hessiankit.verify.comparison import Gaps, Judge
from hessiankit.verify.health import examine, rounding_noise
from hessiankit.verify.probes import probe_directions
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported, run_references


def linear_norm(norm: type[nn.Module] = nn.LayerNorm) -> Problem:
    """Return mean((norm(X W) - T)^2), X 3 x 5: 35 parameters, standard normal values."""
    torch.manual_seed(0)
    X, T, weight, bias, W = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5), (3, 5), (5,), (5,), (5, 5)))
    module = nn.Sequential(nn.Linear(5, 5, bias=False), norm(5)).double()
    return Problem(module, X, T, "mse", {"0.weight": W.T, "1.weight": weight, "1.bias": bias})


def head(dtype: torch.dtype = torch.float64, norm: type[nn.Module] = nn.LayerNorm) -> Problem:
    """Return one attention head with key and query biases: the Hessian of the key bias vanishes identically."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.norm = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 4), norm(4)

        def forward(self, x):
            return self.norm(x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))

    torch.manual_seed(0)
    return Problem(Head().to(dtype), draw(5, 3, 4, dtype=dtype), draw(5, 3, 4, dtype=dtype))


def skip_if_fixed(result: Outcome | Unsupported, truth: torch.Tensor) -> None:
    if isinstance(result, Outcome) and float((result.value - truth).abs().max() / truth.abs().max()) < 1e-10:
        pytest.skip("this torch differentiates through layer_norm correctly: the known defect is gone")


@functools.cache
def written_out() -> tuple[Problem, torch.Tensor]:
    """Return the problem with a norm that every route can follow, and its Hessian."""
    problem = linear_norm(HandWrittenNorm)
    return problem, REFERENCES["reverse-over-reverse"].measure(problem).value


def scaled_block(matrix: torch.Tensor, problem: Problem, i: str, j: str, factor: float) -> torch.Tensor:
    wrong = matrix.clone()
    wrong[problem.slices[i], problem.slices[j]] *= factor
    return wrong


@pytest.mark.parametrize("name", ["torch.func.hessian", "curvlinops"])
def test_the_layer_norm_defect_is_seen_and_named(name):
    problem = linear_norm()
    results = run_references(problem, names=[*RIGHT, name])
    skip_if_fixed(results[name], results["reverse-over-reverse"].value)
    health = examine(results, problem)
    ill = health[name]
    assert not ill.healthy
    assert ill.worst_pair == ("1.weight", "0.weight")
    assert ill.worst_parameter == "1.weight"
    assert str(ill).startswith(f"{name}: unhealthy: not symmetric (0.58 of the largest entry, block 1.weight x 0.weight)")
    assert "known torch defect" in ill.reason
    assert ill.symmetry_error > 0.5
    assert ill.deviation > 0.5
    for right in RIGHT:
        assert health[right].healthy, str(health[right])
        assert health[right].deviation < 1e-10
        assert health[right].symmetry_error < 1e-10


FORWARD = {"jvp(grad)", "torch.func.hessian"}
DEFECTIVE = {
    "batch_norm": {"torch.func.hessian"}, "instance_norm": {"torch.func.hessian"}, "scatter_reduce (prod)": FORWARD,
    "cholesky_inverse": FORWARD, "triangular_solve": {"jvp(grad)"},
}  # fmt: skip
"""Operation of the route table -> the references that are wrong through it."""


@pytest.mark.parametrize("name", DEFECTIVE)
def test_a_reference_that_torch_gets_wrong_does_not_judge(name: str) -> None:
    example = OPERATIONS[name].example(0)
    report = hk.check(example.module, example.x, example.target, against=[*RIGHT, "torch.func.hessian"])
    assert report, report.table()
    ill = {health.reference: health for health in report.health if not health.reason.startswith(("agrees", "unsupported"))}
    assert set(ill) == DEFECTIVE[name]
    for health in ill.values():
        assert health.state == "unhealthy"
        assert "known torch defect: " in health.reason
        assert health.deviation > 0.1


def test_the_whole_panel_with_curvlinops_is_healthy_on_a_hand_written_norm():
    pytest.importorskip("curvlinops")
    problem = linear_norm(HandWrittenNorm)
    health = examine(run_references(problem), problem)
    assert list(health) == list(REFERENCES)
    for report in health.values():
        assert report.healthy, str(report)
        assert report.deviation < 1e-10


@pytest.mark.parametrize("name", ["torch.func.hessian", "curvlinops"])
def test_probes_see_the_defect_at_a_fraction_of_the_cost(name):
    problem = head()
    probes = probe_directions(problem, per_block=1, seed=0)
    assert len(probes.V) == 8
    results = run_references(problem, probes.V, [*RIGHT, name])
    skip_if_fixed(results[name], results["reverse-over-reverse"].value)
    health = examine(results, problem, probes=probes)
    assert not health[name].healthy
    assert health[name].worst_parameter == "norm.weight"
    assert all(health[right].healthy for right in RIGHT), health


def test_float32_has_its_own_tolerance():
    problem = head(torch.float32, HandWrittenNorm)
    health = examine(run_references(problem, names=RIGHT), problem)
    assert all(report.healthy for report in health.values()), health
    assert health["jvp(grad)"].attainable == 1e-4
    assert health["jvp(grad)"].deviation < 1e-5


def test_a_kink_at_the_point_makes_differences_stand_down():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    nn.init.zeros_(module[0].bias)
    x = draw(5, 4)
    x[0] = 0
    problem = Problem(module, x, draw(5, 3))
    health = examine(run_references(problem, names=RIGHT), problem)
    assert not health["central-differences"].healthy
    assert "a kink at the point itself" in health["central-differences"].reason
    assert health["reverse-over-reverse"].healthy
    assert health["jvp(grad)"].healthy


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("probed", [False, True])
def test_an_error_planted_in_any_block_is_found_there(probed, symmetric):
    problem = head(norm=HandWrittenNorm)
    probes = probe_directions(problem, per_block=1) if probed else None
    matrix = REFERENCES["reverse-over-reverse"].measure(problem).value
    noise = rounding_noise(problem, ["reverse-over-reverse"], torch.float64)
    alive = [name for name in problem.params if name != "k.bias"]
    for i in alive:
        for j in alive:
            wrong = scaled_block(matrix, problem, i, j, 1 + 1e-7)
            if symmetric:
                wrong[problem.slices[j], problem.slices[i]] = wrong[problem.slices[i], problem.slices[j]].T
            candidates = {"reverse-over-reverse": matrix, "jvp(grad)": matrix.clone(), "form": wrong}
            if probes:
                candidates = {name: probes.V @ value.T for name, value in candidates.items()}
            report = examine(candidates, problem, probes=probes, noise=noise)["form"]
            assert not report.healthy
            assert report.worst_pair in ({(i, j), (j, i)} if symmetric else {(i, j)})
            assert report.deviation == pytest.approx(1e-7, rel=1e-3)


def test_only_independent_references_judge():
    """A form under test never does, nor do two asymmetric ones, an imprecise one, or two of one group."""
    problem, matrix = written_out()
    wrong, reverse = 2 * matrix, {"reverse-over-reverse": matrix}
    # Two wrong forms that agree with each other do not outvote two references, nor vouch for a lonely one.
    health = examine({"a": wrong, "b": wrong, **reverse, "jvp(grad)": matrix}, problem)
    assert [health[name].healthy for name in health] == [False, False, True, True]
    crooked = scaled_block(matrix, problem, "1.weight", "0.weight", 1.5)
    coarse = Outcome(1.05 * matrix, 0.1 * matrix.abs(), 0.0)  # within its error it agrees with every other route, right or wrong
    unconfirmed = {
        "a lonely reference": {"mine": matrix, **reverse},
        "not symmetric": {"central-differences": crooked, "jvp(grad)": crooked, **reverse},
        "coarse": {"central-differences": coarse, **reverse},
        "one group": dict.fromkeys(("torch.func.hessian", "curvlinops"), matrix),
        "two groups of forward over reverse": dict.fromkeys(("jvp(grad)", "torch.func.hessian"), matrix),
    }
    reasons = {}
    for name, results in unconfirmed.items():
        health = examine(results, problem)
        assert not any(report.healthy for report in health.values()), name
        reasons[name] = {reference: report.reason for reference, report in health.items()}
        reverse = health.get("reverse-over-reverse")
        assert reverse is None or reverse.alone or "not confirmed" in reverse.reason
    assert "not symmetric" in reasons["not symmetric"]["jvp(grad)"]
    assert "resolves some block to 9.5e-02 only" in reasons["coarse"]["central-differences"]


def test_differences_that_contradict_two_routes_are_not_outvoted():
    """Both of these differentiate torch's formulas twice, and may share an error; differences read the gradient alone."""
    problem, matrix = written_out()
    wrong = scaled_block(matrix, problem, "1.weight", "1.weight", 1.5)
    crooked = scaled_block(matrix, problem, "1.weight", "0.weight", 1.5)
    agreed = {"reverse-over-reverse": wrong, "jvp(grad)": wrong}
    for differences in (matrix, crooked):  # the differences of what is no gradient are not symmetric
        health = examine({**agreed, "central-differences": differences}, problem)
        assert not any(report.healthy for report in health.values())
        assert "not confirmed: central-differences contradict it" in health["jvp(grad)"].reason
    unsure = Outcome(matrix, 2 * matrix.abs(), 0.0)
    health = examine({**agreed, "central-differences": unsure}, problem)
    assert [report.healthy for report in health.values()] == [True, True, False]


def test_the_majority_is_counted_by_groups():
    problem, matrix = written_out()
    wrong = scaled_block(matrix, problem, "1.weight", "1.weight", 1.5)
    results = {"torch.func.hessian": wrong, "curvlinops": wrong, "reverse-over-reverse": matrix, "central-differences": matrix}
    health = examine(results, problem)
    assert [report.healthy for report in health.values()] == [False, False, True, True]
    assert "disagrees with reverse-over-reverse" in health["curvlinops"].reason


def test_results_that_are_missing_or_not_finite_are_reported():
    problem, matrix = written_out()
    broken = matrix.clone()
    broken[3, 30] = math.nan
    missing = Unsupported("curvlinops", "relu")
    results = {"reverse-over-reverse": matrix, "jvp(grad)": matrix, "torch.func.hessian": broken, "curvlinops": missing}
    health = examine(results, problem)
    assert str(health["torch.func.hessian"]) == "torch.func.hessian: unhealthy: not finite"
    assert str(health["curvlinops"]) == "curvlinops: unhealthy: unsupported: relu"
    assert health["jvp(grad)"].healthy


def judge(floor: float = 0.0) -> Judge:
    """A judge of two parameters, where rounding leaves ``floor`` in every cell."""
    noise: Any = SimpleNamespace(
        problem=SimpleNamespace(params={"a": None, "b": None}),
        precision=torch.float64,
        eps=2.0**-52,
        floor=lambda labels: torch.full((2, len(labels)), floor, dtype=torch.float64),
    )
    return Judge(noise)


def cells(gap: list[list[float]], size: list[list[float]]) -> Gaps:
    gaps, sizes = (torch.tensor(x, dtype=torch.float64) for x in (gap, size))
    return Gaps(("a", "b"), gaps, sizes, sizes, torch.zeros_like(gaps))


def test_one_cell_that_is_not_finite_is_the_worst():
    worst = judge().worst(cells([[0.0, 0.0], [math.nan, 1e-20]], [[1.0, 1.0], [1.0, 1.0]]))
    assert worst.error == math.inf
    assert worst.pair == ("b", "a")


def test_a_small_cell_that_is_wrong_is_not_taken_for_a_remainder_of_rounding():
    gaps = cells([[0.0, 0.0], [0.0, 1e-10]], [[1.0, 1.0], [1.0, 1e-10]])
    assert judge(floor=1.0).relative(gaps)[1, 1] == 1.0
    below = cells([[0.0, 0.0], [0.0, 1e-15]], [[1.0, 1.0], [1.0, 1e-15]])
    assert judge(floor=1.0).relative(below)[1, 1] == 0.0
