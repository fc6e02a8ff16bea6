"""Solutions from products against solutions with the matrix; indefinite, singular and unsolvable systems; what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from operator_cases import T, X, block, error
from scipy.sparse import linalg as scipy
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor

import hessiankit as hk
from hessiankit.cli.study import digits, split
from hessiankit.curvature import krylov
from hessiankit.curvature.operator import HessianOperator
from hessiankit.curvature.solving import solve
from hessiankit.curvature.structures import StructuredOperator, dense_block


@pytest.fixture(scope="module")
def H() -> HessianOperator:
    return hk.hessian_operator(block(), X, T)


@pytest.fixture(scope="module")
def G() -> HessianOperator:
    return hk.hessian_operator(block(), X, T, kind="ggn")


@pytest.fixture(scope="module")
def b(H: HessianOperator) -> torch.Tensor:
    return torch.randn(H.shape[0], generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def exact(operator: HessianOperator, damping: float, b: torch.Tensor) -> torch.Tensor:
    matrix = operator.to_matrix()
    return torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=torch.float64), b)


@pytest.mark.parametrize("method", ["auto", "cg", "minres", "lsmr"])
def test_a_positive_definite_system(method: str, G: HessianOperator, b: torch.Tensor) -> None:
    found = G.solve(b, damping=0.1, method=method, tol=1e-12)
    assert found.converged
    assert found.method == ("cg" if method == "auto" else method)
    assert found.lowest is None
    assert error(found.x, exact(G, 0.1, b)) < 1e-10
    off = b - G @ found.x - 0.1 * found.x
    assert found.residual == pytest.approx(float(off.norm() / b.norm()), abs=1e-15)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_the_diagonal_of_the_inverse(kind: str) -> None:
    """Against the inverse of the dense matrix; an estimate is near it, and its intervals hold what they say."""
    dense = hk.hessian(block(), X, T)
    matrix = dense.matrix if kind == "hessian" else dense.outer()
    operator, size = hk.hessian_operator(block(), X, T, kind=kind), len(matrix)
    expected = torch.linalg.solve(
        matrix + 0.1 * torch.eye(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)
    ).diagonal()
    found = operator.inverse(0.1).diagonal()
    assert (found.shape, found.is_estimate, bool(found.half_widths.any())) == (torch.Size([size]), False, False)
    assert error(found.values, expected) < 1e-10
    assert "; exact, " in str(found)
    estimate = operator.inverse(0.1, tol=1e-8).diagonal(method="estimate", products=60)
    off = (estimate.values - expected).abs()
    assert estimate.is_estimate
    assert 0 < float((off / expected.abs().max()).max()) < 0.5
    assert float((off <= estimate.half_widths).double().mean()) >= 0.9
    assert "ESTIMATE, 95 % intervals" in str(estimate)
    whole = operator.inverse(0.1).diagonal(method="estimate", products=size)  # as many as there are unit vectors
    assert bool(((whole.values - expected).abs() <= whole.half_widths).all())


def test_the_diagonal_of_a_singular_inverse(G: HessianOperator) -> None:
    with pytest.raises(hk.InputError, match="singular to rounding, with damping=0; pass a larger damping"):
        G.inverse().diagonal()
    with pytest.raises(hk.InputError, match="method='dense' is not known"):
        G.inverse(0.1).diagonal(method="dense")
    blocks = G.block_diagonal()
    matrix = blocks.to_matrix() + 0.1 * torch.eye(len(blocks.to_matrix()), dtype=torch.float64)
    assert error(blocks.inverse(0.1).diagonal().values, torch.linalg.inv(matrix).diagonal()) < 1e-10


@pytest.mark.parametrize("method", ["auto", "minres", "lsmr"])
def test_an_indefinite_system(method: str, H: HessianOperator, b: torch.Tensor) -> None:
    every = torch.linalg.eigvalsh(H.to_matrix())
    assert every[0] < -0.1
    found = H.solve(b, damping=0.05, method=method, tol=1e-11, max_products=3000)
    assert found.converged
    assert error(found.x, exact(H, 0.05, b)) < 1e-7
    if method == "auto":
        assert found.method == "minres"
        assert found.lowest.value == pytest.approx(float(every[0]), rel=1e-3)
        assert f"an eigenvalue of {found.lowest.value:.6g} or less" in str(found)


def test_several_right_hand_sides_and_the_inverse(G: HessianOperator, b: torch.Tensor) -> None:
    B = torch.stack([b, 2 * b, b.flip(0)], dim=1)
    found = G.solve(B, damping=0.1, tol=1e-12)
    assert error(found.x, exact(G, 0.1, B)) < 1e-10
    inverse = G.inverse(0.1, tol=1e-12)
    assert error(inverse @ B, found.x) < 1e-12
    assert error(torch.from_numpy(inverse @ b.numpy()), found.x[:, 0]) < 1e-12
    assert error(inverse.T @ b, found.x[:, 0]) < 1e-12
    for part in (G["attention.*"], G.block_diagonal()):
        one = torch.ones(part.shape[0], dtype=torch.float64)
        assert error(solve(part, one, damping=0.1, tol=1e-12).x, exact(part, 0.1, one)) < 1e-10


def test_preconditioners_save_products() -> None:
    scales = torch.logspace(-1.5, 1.5, 40, dtype=torch.float64)  # of the inputs, which the diagonal sees
    x = torch.randn(60, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scales
    module, target = torch.nn.Linear(40, 1, bias=False).double(), torch.zeros(60, 1, dtype=torch.float64)
    operator, b = hk.hessian_operator(module, x, target), torch.ones(40, dtype=torch.float64)
    diagonal = hk.hessian_diagonal(module, x, target)
    plain = operator.solve(b, damping=1e-3, tol=1e-9)
    inverse = torch.linalg.inv(operator.to_matrix() + 1e-3 * torch.eye(40, dtype=torch.float64))
    ways = [diagonal, diagonal.flat, inverse, inverse.__matmul__, aslinearoperator(inverse.numpy())]
    for way in (*ways, diagonal.flat.numpy(), inverse.numpy(), operator.inverse(1e-3, tol=1e-10)):
        found = operator.solve(b, damping=1e-3, tol=1e-9, preconditioner=way)
        assert found.converged
        assert found.products < 0.6 * plain.products
        assert error(found.x, inverse @ b) < 1e-6


@pytest.mark.parametrize("name", ["diagonal", "kfac", "ekfac"])
def test_preconditioners_by_name(name: str) -> None:
    (images, labels), _ = split(*digits())
    x, y = images[:60].reshape(60, -1)[:, 20:44], labels[:60]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(24, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 10)).double()
    halves = [(x[:40], y[:40]), (x[40:], y[40:])]
    G = hk.hessian_operator(module, halves, loss="cross_entropy", kind="ggn")
    known = hk.approximations(module, x, y, loss="cross_entropy", against="ggn", of=[name])[name].operator.to_matrix()
    C = G.approximation(name)
    assert C is G.approximation(name)
    assert error(C.to_matrix(), known) < 1e-12
    eye = torch.eye(len(known), dtype=torch.float64)
    assert error(C.inverse(1e-3).to_matrix(), torch.linalg.inv(known + 1e-3 * eye)) < 1e-10
    found = G.solve(G.gradient, damping=1e-3, tol=1e-11, preconditioner=name)
    assert found.converged
    assert error(found.x, exact(G, 1e-3, G.gradient)) < 1e-8


@pytest.mark.parametrize("name", ["diagonal", "ekfac"])
def test_an_operator_whose_constants_have_changed_builds_nothing(name: str) -> None:
    """A constant in a closure has no copy: what is built later would be of another matrix."""
    module, gain = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).double(), torch.ones(5).double()
    module[0].register_forward_hook(lambda m, x, y: y * gain)
    G = hk.hessian_operator(module, X, torch.zeros(*X.shape[:-1], 3).double(), kind="ggn")
    gain.mul_(2)
    with pytest.raises(hk.HessiankitError, match="two calls of the module on the same data give different losses"):
        G.approximation(name)


def test_a_singular_system_that_has_solutions_and_one_that_has_none(G: HessianOperator, b: torch.Tensor) -> None:
    found = G.solve(G @ b, method="lsmr", tol=1e-9, max_products=4000)
    assert found.converged
    shortest = torch.linalg.lstsq(G.to_matrix(), G @ b, driver="gelsd").solution
    assert float(found.x.norm()) == pytest.approx(float(shortest.norm()), rel=1e-2)
    none = G.solve(b)
    assert not none.converged
    least = b - G.to_matrix() @ torch.linalg.lstsq(G.to_matrix(), b, rcond=1e-10, driver="gelsd").solution
    assert none.residual == pytest.approx(float(least.norm() / b.norm()), rel=1e-6)
    assert "NO SOLUTION" in str(none)
    with pytest.raises(hk.ConvergenceError, match="NO SOLUTION"):
        G.inverse() @ b


def problem(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a symmetric matrix with some eigenvalues, and a right-hand side."""
    generator = torch.Generator().manual_seed(0)
    size = len(values)
    Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return (Q * values) @ Q.T, torch.randn(size, generator=generator, dtype=torch.float64)


POSITIVE = torch.linspace(0.5, 3.0, 12, dtype=torch.float64)
INDEFINITE = POSITIVE * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6)


@pytest.mark.parametrize("method", ["auto", "lsmr"])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-9])
def test_a_least_squares_solution_is_told_from_one_that_is_not_there_yet(share: float, scale: float, method: str) -> None:
    """Right-hand sides of which a share lies in the range and the rest in the null space."""
    values = torch.cat([torch.zeros(4, dtype=torch.float64), POSITIVE[4:]])
    A, b = problem(values)
    range_part = A @ torch.linalg.pinv(A, hermitian=True) @ b
    b = scale * (share * range_part + b - range_part)
    operator = StructuredOperator(12, [dense_block(torch.arange(12), A)], torch.float64, A.device)
    found = solve(operator, b, method=method, tol=1e-9)
    assert (found.converged, found.least_squares) == (False, True)
    assert found.residual == pytest.approx(float(scale * (b / scale - share * range_part).norm() / b.norm()), rel=1e-9)
    assert error(A @ found.x, scale * share * range_part) <= 1e-9 / share  # the tolerance is of b
    stuck = solve(operator, b, method="minres", tol=1e-9)  # which diverges without a solution
    rest = b - A @ stuck.x
    assert stuck.least_squares == bool((A @ rest).norm() <= 1e-6 * rest.norm())
    early = solve(operator, b, method=method, tol=1e-9, max_products=3)
    assert (early.converged, early.least_squares) == (False, False)
    both = solve(operator, torch.stack([b, A @ range_part], 1), method=method, tol=1e-9)
    assert (both.converged, both.least_squares) == (False, True)
    solved = solve(operator, A @ range_part, method=method, tol=1e-9)
    assert (solved.converged, solved.least_squares) == (True, False)


def test_what_has_not_converged_is_returned_with_its_residual(G: HessianOperator, b: torch.Tensor) -> None:
    found = G.solve(b, damping=1e-3, max_products=4)
    off = b - G @ found.x - 1e-3 * found.x
    assert not found.converged
    assert found.residual == pytest.approx(float(off.norm() / b.norm()))
    assert repr(found).startswith("<Solution: cg, damping 0.001: relative residual ")
    json.dumps(found.to_dict())
    with pytest.raises(
        hk.ConvergenceError, match=r"^InverseOperator: relative residual .* after 5 products, asked for 1e-08"
    ) as seen:
        G.inverse(1e-3, max_products=4) @ b
    assert torch.equal(seen.value.found.x[:, 0], found.x)


BAD = {
    "integers": (lambda H, b: H.solve(b.long()), "b has dtype torch.int64"),
    "entries": (lambda H, b: H.solve(b[1:]), r"b has shape \(87,\)"),
    "rows": (lambda H, b: H.solve(b[1:, None]), r"b has shape \(87, 1\)"),
    "axes": (lambda H, b: H.solve(b[:, None, None]), r"b has shape \(88, 1, 1\)"),
    "no columns": (lambda H, b: H.solve(b[:, None][:, :0]), r"b has shape \(88, 0\)"),
    "NaN": (lambda H, b: H.solve(b * np.nan), "b has NaN or infinite entries"),
    "damping": (lambda H, b: H.solve(b, damping=-1.0), "damping=-1.0; expected 0 or more"),
    "method": (lambda H, b: H.solve(b, method="gmres"), "method='gmres' is not known"),
    "cg of an indefinite one": (lambda H, b: H.solve(b, method="cg"), "H has an eigenvalue of -.* and damping=0; pass a larger"),
    "diagonal": (lambda H, b: H.solve(b, preconditioner=b[1:]), r"preconditioner has shape \(87,\)"),
    "preconditioner": (lambda H, b: H.solve(b, preconditioner=3), "preconditioner is int"),
    "lsmr": (lambda H, b: H.solve(b, preconditioner=b, method="lsmr"), "takes no preconditioner"),
    "name": (lambda H, b: H.solve(b, preconditioner="kfc"), "preconditioner='kfc' is not known"),
    "name for a block": (lambda H, b: H.block_diagonal().solve(b, preconditioner="kfac"), "is a BlockDiagonalOperator; take"),
    "operator": (lambda H, b: solve(H.to_matrix(), b), "operator is Tensor"),
    "rectangle": (lambda H, b: solve(H["norm_1.weight", "attention.W_Q"], b), "operator is 4 x 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str, H: HessianOperator, b: torch.Tensor) -> None:
    call, message = BAD[name]
    with pytest.raises(hk.InputError, match=message) as seen:
        call(H, b)
    assert str(seen.value).startswith("solve: ")
    assert "\n" not in str(seen.value)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_iterates_are_scipys(steps: int, preconditioned: bool) -> None:
    A, b = problem(POSITIVE)
    B, c = problem(INDEFINITE)
    M = 1 / A.diagonal()
    inverse = LinearOperator(A.shape, matvec=lambda v: M.numpy() * v.reshape(-1), dtype=np.float64) if preconditioned else None
    precondition = (lambda v: M * v) if preconditioned else None
    pairs = [
        (
            krylov.conjugate_gradients(A.mv, b, precondition=precondition, tol=0.0, most=steps),
            scipy.cg(A.numpy(), b.numpy(), rtol=0.0, maxiter=steps, M=inverse)[0],
        ),
        (
            krylov.minres(B.mv, c, precondition=precondition, tol=0.0, most=steps),
            scipy.minres(B.numpy(), c.numpy(), rtol=0.0, maxiter=steps, M=inverse)[0],
        ),
    ]
    if not preconditioned:
        expected = scipy.lsmr(B.numpy(), c.numpy(), atol=0.0, btol=0.0, conlim=0.0, maxiter=steps)[0]
        pairs.append((krylov.lsmr(B.mv, c, tol=0.0, most=2 * steps + 1), expected))
    for x, y in pairs:
        assert np.abs(x.numpy() - y).max() <= 1e-9 * np.abs(y).max()


@pytest.mark.parametrize("tol", [0.5, 0.4, 0.3, 0.2, 0.1, 1e-3])
def test_lsmr_stops_where_its_own_measure_of_the_residual_says(tol: float) -> None:
    """On a system with a solution |r| falls below tol |b| at the step at which it stops, and not at the one before."""
    A, b = problem(torch.logspace(0, -2, 60, dtype=torch.float64) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(30))
    count = 0

    def product(v: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return A @ v

    x = krylov.lsmr(product, b, tol=tol, most=1000)
    before = krylov.lsmr(A.mv, b, tol=0.0, most=count - 2)
    assert float((b - A @ x).norm()) <= tol * float(b.norm()) < float((b - A @ before).norm())
