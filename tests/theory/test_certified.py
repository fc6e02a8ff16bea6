"""Certified norms against 60-digit arithmetic: the intervals hold to the last bit, at any scale, and are as tight as they say."""

from __future__ import annotations

from types import SimpleNamespace

import mpmath
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hessiankit.support.errors import InputError
from hessiankit.theory.bounding import certified
from hessiankit.theory.bounding.certified import (
    CertifiedInterval,
    certify,
    frobenius_upper,
    gershgorin_upper,
    growth,
    largest_eigenvalue,
    rayleigh_lower,
    schatten_upper,
    verified_upper,
)


def exact_norm(A: Tensor) -> mpmath.mpf:
    """The spectral norm of the float64 matrix, to 60 digits."""
    with mpmath.workdps(60):
        M = mpmath.matrix([[mpmath.mpf(float(v)) for v in row] for row in A])
        return mpmath.sqrt(max(mpmath.eigsy(M.T * M, eigvals_only=True)))


def symmetric(n: int, seed: int, scale: float = 1.0) -> Tensor:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return (A + A.T) / 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_every_bound_is_on_its_side(seed, scale):
    A = symmetric(5, seed, scale)
    true = exact_norm(A)
    upper = [frobenius_upper(A), gershgorin_upper(A), schatten_upper(A), verified_upper(A)]
    assert all(bound is not None and mpmath.mpf(bound) >= true for bound in upper)
    assert mpmath.mpf(rayleigh_lower(A)) <= true
    assert upper[3] / rayleigh_lower(A) < 1 + 1e-10  # what Cholesky proves is as good as equal


def test_bounds_hold_where_rounding_is_against_them():
    # all ones: ||A||_F = ||A||_1 = ||A||_2 = n exactly, so a bound that is not widened falls below for some n
    for n in (3, 7, 10, 49):
        A = torch.full((n, n), 0.1, dtype=torch.float64)
        true = exact_norm(A)
        for bound in (frobenius_upper(A), gershgorin_upper(A), schatten_upper(A), verified_upper(A)):
            assert mpmath.mpf(bound) >= true
            assert bound / float(true) < 1 + 1e-9


class WorstRounding(TorchFunctionMode):
    """Arithmetic as bad as the model of rounding permits: sums, products and Cholesky err by 0.9 of their bound, all one way.

    A sum of n terms moves by g_n |x| . |y| towards zero (``sign`` -1) or away from it (1); Cholesky's method runs to its end on
    what is positive definite up to its backward error. A bound that holds despite rounding holds in this arithmetic too.
    """

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign

    def __torch_function__(self, f, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if f is torch.linalg.cholesky_ex:
            M, g = args[0], growth(len(args[0]) + 1)
            return f(M + 0.9 * g / (1 - g) * M.trace() * torch.eye(len(M), dtype=M.dtype))
        out = f(*args, **(kwargs or {}))
        if f is torch.Tensor.sum:
            x = args[0]
            error = growth(x.numel() // out.numel()) * x.abs().sum(*args[1:])
        elif f in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            A, B = args
            error = growth(A.shape[-1]) * (A.abs() @ B.abs())
        else:
            return out
        return out + 0.9 * self.sign * out.sign() * error


def test_the_sums_of_simple_bounds_may_round_down():
    A = torch.full((60, 60), 0.7, dtype=torch.float64)
    true = mpmath.mpf(0.7) * 60
    with WorstRounding(-1):
        found = [frobenius_upper(A), gershgorin_upper(A)]
    assert all(true <= mpmath.mpf(bound) <= true * (1 + 1e-11) for bound in found)


@pytest.mark.parametrize("shape", [(20_000, 2), (2, 20_000), (60, 60)])
def test_the_products_of_a_schatten_norm_may_round_down(shape):
    A = torch.full(shape, 0.7, dtype=torch.float64)
    true = mpmath.mpf(0.7) * mpmath.sqrt(shape[0] * shape[1])
    with WorstRounding(-1):
        found = mpmath.mpf(schatten_upper(A))
    assert true <= found <= true * (1 + 1e-10)


def test_a_proof_by_cholesky_allows_for_its_backward_error():
    n = 60
    A = torch.full((n, n), 0.25, dtype=torch.float64)  # of norm 15, exactly
    g = growth(n + 1)
    backward = g / (1 - g) * n * 15
    with WorstRounding(1):
        found = verified_upper(A, guess=15 * (1 - 1e-12) - 8.5 * backward)
    assert found is not None
    assert 15 <= found < 15 * (1 + 1e-3)


def test_the_product_of_a_lower_bound_may_round_up():
    A = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(8):
        A = torch.cat([torch.cat([A, A], 1), torch.cat([A, -A], 1)])  # Hadamard's matrix of order 256, of norm 16
    v = torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with WorstRounding(1):
        found = rayleigh_lower(A, v)  # every vector attains the norm
    assert 16 * (1 - 1e-10) < found <= 16


def test_rectangular_blocks():
    A = torch.randn(3, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    true = exact_norm(A)
    assert mpmath.mpf(schatten_upper(A)) >= true >= mpmath.mpf(rayleigh_lower(A))
    assert schatten_upper(A) / float(true) < 1.1


def test_certificate_of_blocks():
    H, slices = symmetric(9, 2), {"a": slice(0, 4), "b": slice(4, 9)}
    found = certify(H, slices)
    assert found.whole.lower <= float(exact_norm(H)) <= found.whole.upper
    assert found.whole.upper < found.whole.lower * (1 + 1e-9)
    for (i, j), interval in found.pairs.items():
        assert interval.lower <= float(exact_norm(H[slices[i], slices[j]])) <= interval.upper
    assert min(value for value in found.bounds.values() if value is not None) == found.whole.upper
    norms = torch.tensor([[found.pairs[i, j].upper for j in slices] for i in slices], dtype=torch.float64)
    assert found.bounds["norm matrix"] == pytest.approx(float(torch.linalg.eigvalsh(norms)[-1]), rel=1e-9)


class NoProof(TorchFunctionMode):
    """Cholesky's method that never runs to its end."""

    def __torch_function__(self, f, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = f(*args, **(kwargs or {}))
        return SimpleNamespace(L=out.L, info=torch.ones_like(out.info)) if f is torch.linalg.cholesky_ex else out


def test_without_a_proof_by_cholesky_the_other_bounds_hold():
    H, slices = symmetric(9, 2), {"a": slice(0, 4), "b": slice(4, 9)}
    H[slices["a"], slices["b"]] *= 10  # where the norm of the matrix of norms is below Gershgorin's bound of it
    H[slices["b"], slices["a"]] *= 10
    with NoProof():
        found = certify(H, slices)
    assert found.bounds["cholesky"] is None
    assert all(bound >= exact_norm(H) for bound in found.bounds.values() if bound is not None)
    assert found.whole.upper == min(bound for bound in found.bounds.values() if bound is not None)
    assert found.bounds["schatten"] == schatten_upper(H)
    norms = torch.tensor([[found.pairs[i, j].upper for j in slices] for i in slices], dtype=torch.float64)
    assert found.bounds["norm matrix"] == pytest.approx(float(norms.sum(1).max()), rel=1e-12)
    for (i, j), interval in found.pairs.items():
        true = exact_norm(H[slices[i], slices[j]])
        assert interval.lower <= true <= interval.upper < 1.1 * float(true)


def test_a_large_matrix_whose_largest_eigenvalue_lanczos_misses(monkeypatch):
    Q = torch.linalg.qr(symmetric(600, 5)).Q
    H = Q @ torch.diag(torch.linspace(-1, 2, 600, dtype=torch.float64)) @ Q.T
    H, calls = (H + H.T) / 2, []

    def second(A):
        calls.append(A)
        return float((A @ Q[:, -2]).norm()), Q[:, -2]

    assert certify(H, {"a": slice(0, 600)}).norm == pytest.approx(2, rel=1e-13)
    assert largest_eigenvalue(H @ H) == pytest.approx(4, rel=1e-13)
    monkeypatch.setattr(certified, "norm_by_lanczos", second)
    found = certify(H, {"a": slice(0, 600)})
    assert len(calls) == 2  # once for the whole, once for its only block
    assert found.norm == found.norms["a", "a"] == pytest.approx(2, rel=1e-13)
    assert found.whole.lower <= found.norm <= found.whole.upper < found.whole.lower * (1 + 1e-8)
    assert largest_eigenvalue(H @ H) == pytest.approx(4, rel=1e-13)


def test_an_indefinite_guess_is_no_proof():
    A = symmetric(6, 4)
    assert verified_upper(A, guess=0.5 * float(exact_norm(A))) is None


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "expected a square"),
        (torch.zeros(2, 2), "float64"),
        (torch.full((2, 2), torch.nan, dtype=torch.float64), "NaN"),
    ],
)
def test_errors(matrix, message):
    with pytest.raises(InputError, match=message):
        certify(matrix, {"a": slice(0, 2)})


def test_a_sum_of_too_many_numbers_has_no_digits_left():
    with pytest.raises(InputError, match="no digits left"):
        growth(10**16)


def test_zero_matrix():
    found = certify(torch.zeros(3, 3, dtype=torch.float64), {"a": slice(0, 3)})
    assert found.whole == CertifiedInterval(0.0, 0.0)
