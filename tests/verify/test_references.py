"""Every route against Hessians known by hand, and against each other on transformer parts."""

from __future__ import annotations

import pytest
import torch
from reference_cases import RIGHT, Attention, draw, relative
from torch import nn

from hessiankit.support.errors import InputError
from hessiankit.verify import reference_base
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_base import in_chunks
from hessiankit.verify.reference_differences import gradient_noise
from hessiankit.verify.references import REFERENCES, run_references

TOLERANCE = {torch.float64: {"central-differences": 1e-11}, torch.float32: {"central-differences": 1e-3}}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}


def least_squares(dtype: torch.dtype = torch.float64) -> tuple[Problem, torch.Tensor]:
    """Return mean((X W^T + b - T)^2) and its Hessian: [[X^T X, X^T 1], [1^T X, n]] for each output, times 2 / (3 n)."""
    torch.manual_seed(0)
    X, T = draw(7, 4, dtype=dtype), draw(7, 3, dtype=dtype)
    extended = torch.cat([X.double(), torch.ones(7, 1).double()], 1)
    H = torch.kron(torch.eye(3, dtype=torch.float64), 2 / 21 * extended.T @ extended)  # order (output, [weights, bias])
    order = [5 * o + i for o in range(3) for i in range(4)] + [5 * o + 4 for o in range(3)]
    return Problem(nn.Linear(4, 3, dtype=dtype), X, T), H[order][:, order]


def network(activation: nn.Module, *last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3), *last).double()


def by_torch(problem: Problem) -> torch.Tensor:
    return torch.autograd.functional.hessian(problem.flat_loss, problem.theta)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REFERENCES)
def test_least_squares_is_known_by_hand(name, dtype):
    problem, H = least_squares(dtype)
    assert relative(REFERENCES[name].measure(problem).value, H) < TOLERANCE[dtype].get(name, ROUNDING[dtype])


@pytest.mark.parametrize("name", REFERENCES)
def test_products_are_the_matrix_times_each_row(name, monkeypatch):
    problem, H = least_squares()
    V = draw(6, problem.size)
    assert relative(REFERENCES[name].products(problem, V), V @ H) < 1e-11
    monkeypatch.setattr(reference_base, "CHUNK_LIMIT", 4)
    assert relative(REFERENCES[name].products(problem, V), V @ H) < 1e-11
    assert REFERENCES[name].products(problem, V[:0]).shape == (0, problem.size)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_differentiate_at_the_given_parameters(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    values = {n: draw(*p.shape) for n, p in reversed(list(module.named_parameters())) if n != "2.bias"}
    problem = Problem(module, draw(5, 3), draw(5, 2), "mse", values)
    assert relative(REFERENCES[name].measure(problem).value, by_torch(problem)) < 1e-11


@pytest.mark.parametrize("name", [*RIGHT, "torch.func.hessian", "curvlinops"])
def test_fused_attention(name):
    torch.manual_seed(0)
    problem = Problem(Attention().double(), draw(2, 3, 4), draw(2, 3, 4))
    assert relative(REFERENCES[name].measure(problem).value, by_torch(problem)) < 1e-11


@pytest.mark.parametrize("name", [*RIGHT, "torch.func.hessian", "curvlinops"])
def test_cross_entropy_with_unlabelled_tokens(name):
    torch.manual_seed(0)
    labels = torch.tensor([[2, -100, 0], [-100, -100, 1]])
    module = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    x = draw(2, 3, 4)
    H = torch.zeros(12, 12, dtype=torch.float64)
    for b, s in ((0, 0), (0, 2), (1, 2)):
        p = torch.softmax(module.weight.detach() @ x[b, s], 0)
        H += torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(x[b, s], x[b, s])) / 3
    assert relative(REFERENCES[name].measure(Problem(module, x, labels, "cross_entropy")).value, H) < 1e-11


@pytest.mark.parametrize(
    ("activation", "last", "rows", "note", "bound"),
    [(nn.GELU(), (nn.LayerNorm(3),), 8, "", 1e-10), (nn.ReLU(), (), 40, "kinks near the point", 1e-9)],
    ids=["smooth", "between the kinks of a relu"],
)
def test_differences_report_an_error_that_covers_the_true_one(activation, last, rows, note, bound):
    problem = Problem(network(activation, *last), draw(rows, 4), draw(rows, 3))
    exact = REFERENCES["reverse-over-reverse"].measure(problem).value
    outcome = REFERENCES["central-differences"].measure(problem)
    assert bool(((outcome.value - exact).abs() <= outcome.error).all())
    assert relative(outcome.value, exact) < bound
    assert (note in outcome.note) if note else outcome.note == ""
    assert "at the point itself" not in outcome.note
    assert note or float(outcome.error.max() / exact.abs().max()) < bound


def test_gradient_noise_is_of_the_size_of_rounding():
    problem = Problem(network(nn.GELU()), draw(8, 4), draw(8, 3))
    size = float(problem.flat_gradient().abs().max())
    with problem.at():
        noise = gradient_noise(problem, torch.float64)
    assert noise.shape == (4,)
    assert 1e-18 * size < float(noise.min()) <= float(noise.max()) < 1e-15 * size


def test_a_linear_loss_has_no_curvature():
    problem = Problem(nn.Linear(4, 3, dtype=torch.float64), draw(5, 4), None, lambda outputs, target: outputs.sum())
    for outcome in run_references(problem, names=RIGHT).values():
        assert float(outcome.value.abs().max()) < 1e-12


def test_directions_go_one_at_a_time_or_in_halved_chunks():
    """Where they cannot be taken together, and where memory runs out."""
    V, sizes = draw(5, 3), []

    def together(rows):
        raise RuntimeError("no batching rule")

    def crowded(rows):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return 2 * rows

    for function, chunk, note in ((together, 2, "one direction at a time (RuntimeError: no batching rule)"), (crowded, 5, "")):
        value, said = in_chunks(function, lambda row: 2 * row, V, chunk, lambda done, total: None)
        assert torch.equal(value, 2 * V)
        assert said == note
    assert sizes == [5, 2, 2]  # what is left is one direction


def test_unknown_names_and_wrong_directions_are_refused():
    problem, _ = least_squares()
    with pytest.raises(InputError, match="no reference named 'finite'"):
        run_references(problem, names=["finite"])
    with pytest.raises(InputError, match=r"expected \(k, 15\)"):
        REFERENCES["jvp(grad)"].products(problem, torch.ones(15))
