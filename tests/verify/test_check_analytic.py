"""check(analytic=): a user's own closed form, its mistakes, and what the report says of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support.errors import InputError
from hessiankit.verify.testing import assert_hessian_matches

torch.manual_seed(0)
X, T = torch.randn(5, 3).double(), torch.randn(5, 3).double()
N, EYE = T.numel(), torch.eye(3).double()
PLAIN = ("reverse-over-reverse", "jvp(grad)")


class Product(nn.Module):
    """X W_1 W_2, both weights 3 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.W_1, self.W_2 = (nn.Parameter(torch.randn(3, 3).double()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W_1 @ self.W_2


class Scaled(nn.Module):
    """LayerNorm with a gain of X W."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.gamma = nn.Parameter(torch.randn(3, 3).double()), nn.Parameter(torch.rand(3).double() + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * nn.functional.layer_norm(x @ self.W, (3,))


PRODUCT, SCALED = Product(), Scaled()


def of_product(p: dict[str, Tensor], functional: float = 1.0) -> dict[tuple[str, str], Tensor]:
    """The blocks of X W_1 W_2 under squared error."""
    V, W = p["W_1"], p["W_2"]
    A, R = X @ V, X @ V @ W - T
    mixed = torch.einsum("ik,jl->ijkl", X.T @ A, W) + functional * torch.einsum("jk,il->ijkl", EYE, X.T @ R)
    blocks = {("W_1", "W_1"): torch.kron(X.T @ X, W @ W.T), ("W_2", "W_2"): torch.kron(A.T @ A, EYE)}
    return {pair: 2 / N * block for pair, block in {**blocks, ("W_1", "W_2"): mixed.reshape(9, 9)}.items()}


def of_scaled(p: dict[str, Tensor], gain: Tensor | None = None) -> dict[tuple[str, str], Tensor]:
    """The blocks of gamma LN(X W) under squared error, as in docs/concepts/one_sum.md; ``gain``: that of the block of W."""
    W, gamma, P = p["W"], p["gamma"], EYE - 1 / 3
    g = gamma if gain is None else gain
    WW, Wg, gg = torch.zeros(9, 9).double(), torch.zeros(9, 3).double(), torch.zeros(3, 3).double()
    for x, t in zip(X, T, strict=True):
        c = P @ (x @ W)
        s = (c @ c / 3 + 1e-5).sqrt()
        y, r = c / s, 2 / N * (gamma * c / s - t)
        J, q = (P - torch.outer(y, y) / 3) / s, (P - torch.outer(y, y) / 3) @ (g * r)
        bend = -(torch.outer(q, y) + torch.outer(y, q) + (g * r) @ y * (P - torch.outer(y, y) / 3)) / (3 * s**2)
        WW += torch.kron(torch.outer(x, x), J.T @ torch.diag(2 / N * g**2) @ J + bend)
        Wg += torch.kron(x[:, None], J.T @ torch.diag(r + 2 / N * gamma * y))
        gg += torch.diag(2 / N * y**2)
    return {("W", "W"): WW, ("W", "gamma"): Wg, ("gamma", "gamma"): gg}


def whole(blocks: dict[tuple[str, str], Tensor]) -> Tensor:
    a, b = blocks["W_1", "W_1"], blocks["W_1", "W_2"]
    return torch.cat([torch.cat([a, b], 1), torch.cat([b.T, blocks["W_2", "W_2"]], 1)])


def right() -> dict[tuple[str, str], Tensor]:
    return of_product({name: p.detach() for name, p in PRODUCT.named_parameters()})


def wrong(pair: tuple[str, str], change: Callable[[Tensor], Tensor]) -> dict[tuple[str, str], Tensor]:
    return {**right(), pair: change(right()[pair])}


def one_entry(block: Tensor) -> Tensor:
    block = block.clone()
    block[5, 1] += 1e-4
    return block


VEC_C = torch.arange(9).reshape(3, 3).T.reshape(-1)
BOTH = torch.cat([VEC_C, VEC_C + 9])


def swapped(p: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    return {("W_1", "W_1"): 2 / N * torch.kron(p["W_2"] @ p["W_2"].T, X.T @ X)}


WRONG: dict[str, tuple[nn.Module, Any, int, str]] = {
    "transposed": (
        PRODUCT,
        wrong(("W_1", "W_2"), lambda B: B.T),
        1,
        "W_1 x W_2 is off by .* of its largest entry; your block is right if transposed",
    ),
    "halved": (
        PRODUCT,
        wrong(("W_1", "W_1"), lambda B: B / 2),
        1,
        "W_1 x W_1 is off by .* of its largest entry; your block is right if doubled",
    ),
    "vec_c": (PRODUCT, whole(right())[BOTH][:, BOTH], 4, r"right if reordered from column-stacking \(vec_c\) to vec_r"),
    "rows in vec_c": (PRODUCT, wrong(("W_1", "W_2"), lambda B: B[VEC_C]), 1, "right if its rows are reordered"),
    "Kronecker factors swapped": (PRODUCT, swapped, 1, r"right if reordered from column-stacking \(vec_c\) to vec_r"),
    "a mean over samples for the sum": (PRODUCT, whole(right()) / 5, 4, "right if multiplied by 5, the number of samples"),
    "a sum for the mean": (
        PRODUCT,
        lambda p: whole(right()) * N,
        4,
        "right if divided by 15, the number of entries of the target",
    ),
    "the square without its factor": (PRODUCT, whole(right()) * N / 2, 4, "multiplied by 2/15, with 15 entries of the target"),
    "a sign": (
        PRODUCT,
        wrong(("W_2", "W_2"), torch.neg),
        1,
        "W_2 x W_2 is off by .* of its largest entry; your block is right if negated",
    ),
    "transposed and of another sign": (PRODUCT, wrong(("W_1", "W_2"), lambda B: -B.T), 1, "right if transposed and negated"),
    "Gauss-Newton alone": (
        PRODUCT,
        lambda p: of_product(p, 0.0),
        1,
        r"right if its functional part is added \(it is the Gauss-Newton part alone\)",
    ),
    "gamma forgotten": (
        SCALED,
        lambda p: of_scaled(p, torch.ones(3).double()),
        1,
        r"analytic: W x W is off by 1.9e-01 of .*; no transpose.*; entry W\[\d, \d\] x W\[\d, \d\] is ",
    ),
    "not a number": (
        PRODUCT,
        wrong(("W_2", "W_2"), lambda B: B * torch.nan),
        1,
        "W_2 x W_2 is off by nan of .*; 9 of 9 rows differ",
    ),
    "one entry": (
        PRODUCT,
        wrong(("W_1", "W_2"), one_entry),
        1,
        r"W_1\[1, 2\] x W_2\[0, 1\] is 0.\d*, and should be .*1 of 9 rows differ",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_closed_form_fails_and_the_report_says_what_would_make_it_right(mistake: str) -> None:
    module, analytic, blocks, words = WRONG[mistake]
    report = hk.check(module, X, T, against=PLAIN, analytic=analytic)
    assert not report
    assert {row.name for row in report.rows if not row.passed} == {row.name for row in report.rows if row.note}
    assert len({row.name for row in report.rows if row.note}) == blocks
    assert all(row.name.startswith("analytic: ") for row in report.rows if not row.passed)
    assert re.search(words, f"{report.verdict}\n{report.table()}")


def test_a_wrong_closed_form_raises_in_a_test_suite() -> None:
    with pytest.raises(
        AssertionError,
        match=r"the worst is analytic: W_2 x W_2 against .* Note: your block is right if negated; entry W_2\[0, 0\] x W_2\[0, 0\] is -",
    ):
        assert_hessian_matches(PRODUCT, X, T, analytic=wrong(("W_2", "W_2"), torch.neg))


RIGHT: dict[str, Any] = {
    "a matrix": whole(right()),
    "an array": whole(right()).numpy(),
    "some blocks": wrong(("W_1", "W_2"), Tensor.numpy),
    "a block below the diagonal": {("W_2", "W_1"): right()["W_1", "W_2"].T},
    "blocks in the shapes of the parameters": {("W_1", "W_2"): right()["W_1", "W_2"].reshape(3, 3, 3, 3)},
    "a function": of_product,
    "a function that returns a matrix": lambda p: whole(of_product(p)),
    "float32": whole(right()).float(),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_closed_form_passes_beside_every_reference(kind: str) -> None:
    report = hk.check(PRODUCT, X, T, analytic=RIGHT[kind])
    assert report, report
    rows = [row for row in report.rows if row.name.startswith("analytic: ")]
    assert {row.reference for row in rows} == {"hessiankit", *report.references}
    assert max(row.max_rel_error for row in rows) < (1e-6 if kind == "float32" else 1e-10)
    assert ("analytic, in torch.float32, is compared to 1e-03" in str(report.remarks)) == (kind == "float32")


def test_the_function_is_called_with_the_parameters_in_the_dtype_of_the_check() -> None:
    seen: list[Tensor] = []
    layer = nn.Linear(3, 3, bias=False)

    def analytic(p: dict[str, Tensor]) -> Tensor:
        seen.append(p["weight"])
        return 2 / N * torch.kron(EYE, X.T @ X)

    assert hk.check(layer, X, T, analytic=analytic)
    assert torch.equal(seen[0], layer.weight.detach().double())
    seen[0].zero_()  # a copy
    assert layer.weight.any()


def test_other_names_of_tied_parameters_are_understood() -> None:
    module = nn.Sequential(PRODUCT, nn.Identity())
    module[1].register_parameter("W", PRODUCT.W_1)
    assert hk.check(module, X, T, against=PLAIN, analytic={("1.W", "0.W_2"): right()["W_1", "W_2"]})


def test_a_block_that_is_zero_may_hold_what_rounding_left_of_the_users_formula() -> None:
    keys = hk.TransformerBlock(4, 5, 2, attention_bias=True)
    pair = ("attention.b_K", "attention.b_K")
    for size, passes in ((0.0, True), (1e-16, True), (1e-9, False)):
        report = hk.check(keys, formulas=False, analytic={pair: torch.full((4, 4), size).double()})
        assert bool(report) is passes, report


def two_layers(width: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A large linear map, and one of 12 parameters behind it."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(width, 3, bias=False), nn.Linear(3, 4, bias=False)).double()
    return module, torch.randn(6, width).double(), torch.randn(6, 4).double()


def blocks_of_two_layers(p: dict[str, Tensor], x: Tensor, target: Tensor) -> dict[tuple[str, str], Tensor]:
    """The blocks of the second weight, I (x) A^T A of its inputs A, and of both, of x V^T W^T under squared error."""
    V, W = p["0.weight"], p["1.weight"]
    A = x @ V.T
    R = A @ W.T - target
    mixed = torch.einsum("nb,ca,nd->abcd", x, W, A) + torch.einsum("nb,nc,ad->abcd", x, R, EYE)
    blocks = {("1.weight", "1.weight"): torch.kron(torch.eye(4).double(), A.T @ A), ("0.weight", "1.weight"): mixed}
    return {pair: 2 / target.numel() * block for pair, block in blocks.items()}


@pytest.mark.parametrize("width", [150, 1800])  # 462 parameters: along directions; 5,412: without a matrix
def test_larger_modules_compare_products(width: int) -> None:
    module, x, target = two_layers(width)
    report = hk.check(module, x, target, analytic=lambda p: blocks_of_two_layers(p, x, target))
    assert report, report
    assert {row.name for row in report.rows if row.name.startswith("analytic") and row.reference == "jvp(grad)"} == {
        "analytic: 1.weight x 1.weight", "analytic: 0.weight x 1.weight"
    }  # fmt: skip
    values = {name: p.detach() for name, p in module.named_parameters()}
    own, mixed = blocks_of_two_layers(values, x, target).values()
    mixed = mixed.reshape(3 * width, 12)
    down, across = (torch.arange(p.numel()).reshape(p.shape).T.flatten() for p in values.values())
    entry = own.clone()
    entry[7, 2] += 0.5
    for pair, block, words in (
        (("1.weight", "1.weight"), entry, r"1\.weight\[2, 1\] x 1\.weight\[0, 2\] is .*, and should be "),
        (("1.weight", "1.weight"), 2 * own, "right if halved"),
        (("0.weight", "1.weight"), mixed[down][:, across], r"right if reordered from column-stacking \(vec_c\) to vec_r"),
        (("0.weight", "1.weight"), mixed[:, across], "right if its columns are reordered"),
    ):
        failed = hk.check(module, x, target, against=PLAIN, analytic={pair: block})
        assert not failed
        assert re.search(words, failed.verdict)


BAD: dict[str, tuple[Any, str]] = {
    "a matrix of another size": (
        torch.zeros(9, 9),
        r"analytic is a Tensor of shape \(9, 9\), torch.float32; expected real numbers of shape \(12, 12\), a row for each .*W, gamma",
    ),
    "an unknown name": ({("W", "beta"): torch.zeros(9, 3)}, "check: analytic: no parameter 'beta'; there are 'W', 'gamma'"),
    "a name alone": ({"W": torch.zeros(9, 9)}, r"analytic has the key 'W'; expected a pair of names, such as \('W', 'gamma'\)"),
    "a part": ({("W[0]", "W"): torch.zeros(3, 9)}, r"analytic has the key \('W\[0\]', 'W'\); expected a pair of names"),
    "a transposed block": (
        {("W", "gamma"): torch.zeros(3, 9)},
        r"analytic\['W', 'gamma'\] is a Tensor of shape \(3, 9\), .*; expected real numbers of shape \(9, 3\), .*; its transpose has that shape",
    ),
    "a function of them": (
        lambda p: p["W"],
        r"analytic is a Tensor of shape \(3, 3\), torch.float64; expected real numbers of shape \(12, 12\)",
    ),
    "text": ("matrix", "analytic is a str of shape .*; expected real numbers of shape"),
    "complex": (np.zeros((12, 12), complex), "analytic is a ndarray of shape .*, complex128; expected real numbers"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_shapes_and_names_that_do_not_fit_are_one_error(mistake: str) -> None:
    analytic, message = BAD[mistake]
    with pytest.raises(InputError, match=message):
        hk.check(SCALED, X, T, analytic=analytic)


def softmax_jacobian(x: Tensor) -> Tensor:
    return torch.block_diag(*(torch.diag(s) - torch.outer(s, s) for s in x.softmax(-1)))


WEIGHT = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("f", "analytic"),
    [
        (lambda x: x.softmax(-1), softmax_jacobian),
        (lambda x: x @ WEIGHT.T.to(x), lambda x: torch.kron(torch.eye(3), WEIGHT).to(x)),
        (lambda x: x.T, lambda x: torch.einsum("ik,jl->jikl", torch.eye(3), torch.eye(4)).to(x)),
    ],
)
def test_a_jacobian_of_the_users_own(f: Callable[[Tensor], Tensor], analytic: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    report = hk.check_jacobian(f, x, analytic=analytic)
    assert report.passed
    assert [row for row in report.rows if row.name == "analytic: output x x"]
    report = hk.check_jacobian(f, x, analytic=lambda x: 1.5 * analytic(x))
    assert not report.passed
    assert "your block is right if multiplied by 0.666667" in report.verdict


def test_a_jacobian_in_column_order_is_told() -> None:
    report = hk.check_jacobian(nn.Linear(4, 2), torch.randn(3, 4), analytic=torch.kron(torch.randn(2, 4), torch.eye(3)))
    assert not report.passed
    assert "no transpose" in report.verdict
    layer = nn.Linear(4, 2)
    report = hk.check_jacobian(layer, torch.randn(3, 4), analytic=torch.kron(layer.weight.double(), torch.eye(3).double()))
    assert "column-stacking (vec_c) to vec_r" in report.verdict
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("f", "x", "message"),
    [
        (nn.Identity(), [1.0], "x is a list; expected a tensor of real"),
        (nn.Identity(), torch.tensor([1]), "x is torch.int64"),
        (lambda x: x.sum().item(), torch.ones(2), r"f\(x\) is a float"),
        (nn.Linear(3, 2), torch.ones(2), r"f\(x\) raised RuntimeError"),
        (nn.Identity(), torch.ones(3), r"analytic\['output', 'x'\] is a Tensor of shape \(2, 2\)"),
    ],
)
def test_jacobians_that_cannot_be_checked(f: Callable[[Tensor], Tensor], x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hk.check_jacobian(f, x, analytic=torch.eye(2))
