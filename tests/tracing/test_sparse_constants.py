"""Sparse tensors that the parameters do not reach: buffers, attributes, inputs; beside the same module with dense ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from curvature_reference import draw, mse, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse_coo, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc, "dense": Tensor.clone,
}  # fmt: skip
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.sparse.mm": torch.sparse.mm,
    "@": lambda A, z: A @ z,
    "torch.mm": torch.mm,
    "torch.sparse.addmm": lambda A, z: torch.sparse.addmm(z, A, z),
    "two": lambda A, z: torch.sparse.mm(A, torch.sparse.mm(A, z).tanh()),
    "by a vector": lambda A, z: z * (A @ z[:, 0]).unsqueeze(1),
}
ADJACENCY = draw(6, 6, seed=3) * (draw(6, 6, seed=4) > 0.3)
X, TARGET = draw(6, 3, seed=5), draw(6, 2, seed=6)


class Graph(nn.Module):
    """A graph convolution, which holds the adjacency matrix or is given it."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], adjacency: Tensor | None, *, buffer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.product = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), product
        if buffer:
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        adjacency = self.adjacency if adjacency is None else adjacency
        return self.last(self.product(adjacency, self.first(x)).sin())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls sparse layouts a beta
        yield


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("torch.sparse.mm", "@") for layout in ("coo", "csr", "csc")),
        ("torch.mm", "csc"),
        ("torch.sparse.addmm", "coo"),
        ("torch.sparse.addmm", "csr"),
        ("two", "csr"),
        ("by a vector", "csc"),
    ],
)
def test_a_sparse_buffer(name: str, layout: str) -> None:
    module = Graph(PRODUCTS[name], LAYOUTS[layout](ADJACENCY))
    expected = reverse_over_reverse(Graph(PRODUCTS[name], LAYOUTS["coo"](ADJACENCY)), X, TARGET, mse)
    if name in ("@", "torch.mm", "by a vector"):
        assert expected.allclose(reverse_over_reverse(Graph(PRODUCTS[name], ADJACENCY), X, TARGET, mse), rtol=0, atol=1e-13)
    assert hk.hessian(module, X, TARGET).matrix.allclose(expected, rtol=0, atol=1e-13)
    assert hk.hessian_operator(module, X, TARGET).to_matrix().allclose(expected, rtol=0, atol=1e-13)
    assert hk.hessian_diagonal(module, X, TARGET).flat.allclose(expected.diagonal(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("how", ["attribute", "input"])
def test_a_sparse_attribute_or_input(how: str, layout: str) -> None:
    A = LAYOUTS[layout](ADJACENCY)
    module = Graph(torch.mm, A if how == "attribute" else None, buffer=False)
    inputs = X if how == "attribute" else (X, A)
    expected = reverse_over_reverse(Graph(torch.mm, ADJACENCY), X, TARGET, mse)
    assert hk.hessian(module, inputs, TARGET).matrix.allclose(expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_what_is_wrong_with_a_sparse_tensor_is_said(layout: str) -> None:
    broken = ADJACENCY.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(hk.InputError, match="'adjacency' contains NaN or infinity"):
        hk.hessian(Graph(torch.mm, LAYOUTS[layout](broken)), X, TARGET)

    class Written(Graph):
        def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
            self.adjacency.mul_(2)
            return super().forward(x)

    module = Written(torch.mm, LAYOUTS[layout](ADJACENCY))
    with pytest.raises(hk.InputError, match="changes its buffer 'adjacency'"):
        hk.hessian(module, X, TARGET)
    assert module.adjacency.to_dense().equal(ADJACENCY)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_writing_in_place_beside_a_sparse_tensor(layout: str) -> None:
    def product(A: Tensor, z: Tensor) -> Tensor:
        y = A @ z
        y[1] = z[0] * 2
        y += 1
        return y

    expected = reverse_over_reverse(Graph(product, ADJACENCY), X, TARGET, mse)
    found = hk.hessian(Graph(product, LAYOUTS[layout](ADJACENCY)), X, TARGET).matrix
    assert found.allclose(expected, rtol=0, atol=1e-13)
