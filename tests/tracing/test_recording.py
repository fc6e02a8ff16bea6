"""What a forward pass is recorded as: torch's operations, autograd's own cuts, compiled and sparse parts, never a silent constant."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, mse, reverse_over_reverse
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.primitives.linear import MatMul
from hessiankit.tracing import recording
from hessiankit.tracing.fallback import AutomaticDifferentiation
from hessiankit.tracing.recording import can_record
from hessiankit.tracing.source_line import source_line
from hessiankit.tracing.trace import Trace

X = draw(3, 4)


def formula(f: Callable[..., Any]) -> Formula:
    return Formula(f, W=(4, 4), v=(4,))


@pytest.fixture(autouse=True)
def nothing_stays_switched_on():
    """Torch works as before after every test here, whatever was raised."""
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
    a = torch.tensor([1.0, 3.0], requires_grad=True)
    assert torch.autograd.grad((a * a).sum(), a)[0].tolist() == [2.0, 6.0]


def twice(s: Formula, x: Tensor) -> Tensor:
    """An inner function that is used within a vmap of data."""
    kept = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(torch.arange(4), torch.arange(4))
    return torch.tanh(x @ (s.W * kept)) * s.v


def inner_gradient_switch(s: Formula, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = torch.tanh(x @ s.W)
        with torch.enable_grad():
            second = torch.sin(x @ s.W)
    return first * second * s.v


def written_constant(s: Formula, x: Tensor) -> Tensor:
    m = torch.zeros(3, 4, dtype=x.dtype)
    m[0], m[1] = s.v, s.W[2]
    m[:, 2] += 3
    return torch.tanh(x @ s.W + m.mul_(2)) * s.v


def written_out(s: Formula, x: Tensor) -> Tensor:
    doubled = torch.empty(3, 4, dtype=x.dtype)
    torch.mul(x, 2, out=doubled)
    return torch.tanh(doubled @ s.W) * s.v


def mask_written_into(s: Formula, x: Tensor) -> Tensor:
    kept = torch.vmap(lambda row: row > 0)(x)
    kept[0] = True
    kept[:, 1].logical_not_()
    return torch.tanh(x @ s.W).masked_fill(kept, 0.5) * s.v


def given_data(s: Formula, x: Tensor) -> Tensor:
    y = torch.zeros(3, 4, dtype=x.dtype)
    y.data = (x @ s.W).data
    return torch.tanh(x @ s.W) * y * s.v


def moved_is_given_data(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    y.data = x
    return torch.tanh(y) * s.v


EXACT: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "detach": lambda s, x: (y := torch.tanh(x @ s.W)) * y.detach() * s.v,
    "gradients off and on": inner_gradient_switch,
    "detached and differentiated again": lambda s, x: torch.tanh((x @ s.W).detach().requires_grad_()) * s.v,
    "a constant written into": written_constant,
    "out=": written_out,
    "vmap of data": twice,
    "vmap of data, written into": mask_written_into,
    "other data of a constant": given_data,
    "addcmul_": lambda s, x: torch.tanh((x @ s.W).addcmul_(torch.tanh(x * s.v), x, value=0.5)),
    "addmm_": lambda s, x: torch.tanh((x @ s.W).addmm_(x * s.v, s.W)),
    "square_": lambda s, x: torch.tanh((x @ s.W).square_()) * s.v,
}


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_are_those_of_autograd(name):
    found = assert_exact(formula(EXACT[name]), X)
    assert found.fallbacks == ()


def test_autocast_is_the_casts_that_it_makes():
    def automatic(s: Formula, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.layer_norm((x.float() @ s.W.float()).relu() @ s.W.float(), (4,))
        return torch.tanh(y.double()) * s.v

    def explicit(s: Formula, x: Tensor) -> Tensor:
        y = (x.float().bfloat16() @ s.W.float().bfloat16()).relu() @ s.W.float().bfloat16()
        return torch.tanh(F.layer_norm(y, (4,)).double()) * s.v

    found, expected = (hk.hessian(formula(f), X, draw(3, 4, seed=7)).matrix for f in (automatic, explicit))
    assert (found - expected).abs().max() <= 1e-14 * expected.abs().max()


def viewed_without_gradient(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    with torch.no_grad():
        row = y[0]
    y += x
    return y * row * s.v


REFUSED: dict[str, tuple[Callable[[Formula, Tensor], Tensor], str]] = {
    "other data": (moved_is_given_data, "is given other .data"),
    "sparse": (
        lambda s, x: torch.sparse.mm((x @ s.W).to_sparse(), s.W) * s.v,
        "works on sparse tensors that the parameters reach",
    ),
    "an array": (
        lambda s, x: torch.tanh(x @ s.W) * s.v * torch.from_numpy((s.v * 2).numpy()),
        r"raised RuntimeError: Can't call numpy",
    ),
    "a view made without gradients": (viewed_without_gradient, "raised RuntimeError: A view was created in no_grad mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_an_error(name):
    f, message = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls sparse layouts a beta
        with pytest.raises((hk.TraceError, hk.InputError), match=message):
            hk.hessian(formula(f), X, draw(3, 4, seed=7))


def test_threads_take_turns():
    module = formula(lambda s, x: torch.tanh(x @ s.W) * s.v)
    expected, fast = hk.hessian(module, X, X).matrix, torch.backends.mha.get_fastpath_enabled()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # without turns, this fails
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: hk.hessian(module, X, X).matrix, range(24)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(matrix, expected) for matrix in found)
    assert torch.backends.mha.get_fastpath_enabled() is fast


def test_a_torch_without_the_internals_is_named(monkeypatch):
    assert can_record()
    with monkeypatch.context() as patch:
        patch.setattr(recording, "enable_python_dispatcher", None)
        assert not can_record()
        with pytest.raises(hk.TraceError, match=r"torch .* lacks internals that recording a module stands on"):
            hk.hessian(formula(lambda s, x: torch.tanh(x @ s.W)[:, :2] * s.v[1:3]), X, X[:, :2])
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_INTERNALS", SimpleNamespace())
        assert not can_record()
    assert can_record()


def traced(module: nn.Module, *inputs: Tensor) -> Trace:
    def function(parameters: dict[str, Tensor], *given: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, given)

    return hk.trace_module(function, dict(module.named_parameters()), inputs)


def kinds(trace: Trace) -> list[type]:
    return [type(a.primitive) for a in trace.applications]


def test_what_has_no_chapter_is_named_once_and_differentiated():
    module = Formula(lambda s, x: torch.sinc(torch.special.i0e((x @ s.W).sinc())), W=(4, 2))
    trace = traced(module, draw(3, 4))
    assert trace.fallbacks == ("aten.sinc.default", "aten.special_i0e.default")
    assert kinds(trace) == [MatMul, *[AutomaticDifferentiation] * 3]
    assert "aten.sinc.default" in hk.hessian(module, draw(3, 4), draw(3, 2)).table()
    assert "AutomaticDifferentiation" in str(trace)
    assert str(trace).endswith(f"differentiated by torch: {', '.join(trace.fallbacks)}")


def expert_of_each_row(s: Formula, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    best = int(y.sum(1).argmax())
    parts = [row.exp() if number == best else row for number, row in enumerate(y)]
    return torch.stack(parts) * (y > 0).sum().item() + y[y > 0].sum()


@pytest.mark.parametrize("x", [draw(3, 4), draw(3, 4).abs()])
def test_branches_are_those_taken_at_the_point(x):
    assert assert_exact(Formula(expert_of_each_row, W=(4, 2)), x).fallbacks == ()


def test_values_without_entries():
    module = Formula(lambda s, x: torch.cat([torch.tanh(x @ s.W), (x @ s.W)[:, 2:] + s.b[2:]], 1) + s.b, W=(4, 2), b=(2,))
    assert assert_exact(module, draw(3, 4)).fallbacks == ()


UNTRACEABLE: dict[str, tuple[Callable[..., object], str]] = {
    "several outputs": (lambda s, x: (x @ s.W, x), "not one tensor"),
    "constant": (lambda s, x: x.exp(), "does not depend on the parameters"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced(name):
    f, message = UNTRACEABLE[name]
    with pytest.raises(hk.TraceError, match=message):
        traced(Formula(f, W=(4, 2)), draw(3, 4))


def test_trace_error_names_the_line() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("one call is enough")
            return self.layer(x)

    with pytest.raises(hk.InputError, match=r'at .*test_recording.py:\d+ in forward: raise ValueError\("one call') as caught:
        hk.hessian(Stubborn(), draw(2, 4), draw(2, 3))
    assert "\n" not in str(caught.value)


def test_an_exception_that_led_to_another() -> None:
    error = KeyError()
    try:
        raise ValueError("no")  # cause
    except ValueError as cause:
        error.__cause__ = cause
    assert source_line(error).endswith('raise ValueError("no")  # cause')
    assert source_line(ValueError("never raised")) == ""


DATA, TARGET = draw(5, 4), draw(5, 2, seed=2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def whole() -> nn.Module:
    return torch.compile(network(), backend="eager")  # type: ignore[return-value]


def part() -> nn.Module:
    module = network()
    module[0] = torch.compile(module[0], backend="eager")  # type: ignore[assignment]
    return module


def a_part_in_place() -> nn.Module:
    module = network()
    module[2].compile(backend="eager")
    return module


COMPILED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "hessian": (whole, lambda m: hk.hessian(m, DATA, TARGET).block("0.weight", "2.weight")),
    "hessian_operator": (part, lambda m: hk.hessian_operator(m, DATA, TARGET).to_matrix()),
    "jacobian_operator": (a_part_in_place, lambda m: hk.jacobian_operator(m, DATA).to_matrix()),
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_original_is_what_is_traced(name: str) -> None:
    make, call = COMPILED[name]
    module = make()
    before = module(DATA)
    assert call(module).allclose(call(network()), rtol=0, atol=1e-13)
    assert module(DATA).equal(before)


def test_check_with_a_compiled_loss() -> None:
    assert hk.check(part(), DATA, TARGET, loss=torch.compile(nn.MSELoss(), backend="eager"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.cond, which compiles
@pytest.mark.parametrize(("moving", "sign"), [(False, -1.0), (True, 1.0)])
def test_torch_cond_takes_its_branch(moving: bool, sign: float) -> None:
    def formula(cond: Callable[..., Any]) -> Formula:
        def f(s: Formula, x: Tensor) -> Tensor:
            z = x @ s.W
            return cond(sign * (z if moving else x).sum() > 0, torch.sin, torch.exp, (z,))  # type: ignore[no-any-return]

        return Formula(f, W=(4, 2))

    plain = formula(lambda condition, true, false, operands: (true if condition else false)(*operands))
    assert hk.hessian(formula(torch.cond), DATA, TARGET).matrix.allclose(
        hk.hessian(plain, DATA, TARGET).matrix, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_operator, hk.hessian_diagonal])
def test_nested_tensors_are_refused_in_words_of_the_user(call: Callable[..., Any]) -> None:
    offsets = torch.tensor([0, 2, 5])

    def inside(s: Formula, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x @ s.W, offsets)
        return (rows * rows).values()

    with pytest.raises(hk.TraceError, match=r"makes a nested tensor .* pad the rows to one length and mask the padding"):
        call(Formula(inside, W=(4, 2)), DATA, TARGET)
    rows = torch.nested.nested_tensor_from_jagged(DATA, offsets)
    with pytest.raises(hk.InputError, match=r"inputs is a nested tensor .* pass a dense one with a mask for the padding"):
        call(Formula(lambda s, x: (x @ s.W).values(), W=(4, 2)), rows, TARGET)


sparse = pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls sparse layouts a beta

LAYOUTS = {"coo": Tensor.to_sparse_coo, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}
Product = Callable[[Tensor, Tensor], Tensor]


def written(A: Tensor, z: Tensor) -> Tensor:
    y = A @ z
    y[1] = z[0] * 2
    y += 1
    return y


PRODUCTS: dict[str, tuple[Product, Product]] = {
    "torch.sparse.mm": (torch.sparse.mm, torch.mm),
    "@": (lambda A, z: A @ z, torch.mm),
    "torch.mm": (torch.mm, torch.mm),
    "torch.sparse.addmm": (lambda A, z: torch.sparse.addmm(z, A, z), lambda A, z: z + A @ z),
    "by a vector": (lambda A, z: z * (A @ z[:, 0]).unsqueeze(1), lambda A, z: z * (A @ z[:, :1])),
    "written into": (written, written),
}
"""With a sparse matrix, and the same with a dense one."""
ADJACENCY = draw(6, 6, seed=3) * (draw(6, 6, seed=4) > 0.3)
NODES, NODE_TARGET = draw(6, 3, seed=5), draw(6, 2, seed=6)


def graph(product: Product, adjacency: Tensor, held: str = "buffer") -> Formula:
    """A graph convolution, which holds the adjacency matrix or is given it."""

    def f(m: nn.Module, x: Tensor, *given: Tensor) -> Tensor:
        return m.last(product(*(given or (m.adjacency,)), m.first(x)).sin())

    module = Formula(f, first=nn.Linear(3, 4), last=nn.Linear(4, 2))
    if held == "buffer":
        module.register_buffer("adjacency", adjacency)
    else:
        module.adjacency = adjacency
    return module


@sparse
@pytest.mark.parametrize(
    ("k", "name", "layout"),
    [
        *((k, name, layout) for name in ("torch.sparse.mm", "@") for k, layout in enumerate(LAYOUTS)),
        (0, "torch.mm", "csc"),
        (1, "torch.sparse.addmm", "coo"),
        (2, "torch.sparse.addmm", "csr"),
        (0, "by a vector", "csc"),
        (1, "written into", "csr"),
        (2, "written into", "coo"),
    ],
)
def test_a_sparse_buffer(k: int, name: str, layout: str) -> None:
    product, plain = PRODUCTS[name]
    expected = reverse_over_reverse(graph(plain, ADJACENCY), NODES, NODE_TARGET, mse)
    assert_readings(expected, graph(product, LAYOUTS[layout](ADJACENCY)), NODES, NODE_TARGET, readings=in_turn(k), floor=1e-13)


@sparse
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("held", ["attribute", "input"])
def test_a_sparse_attribute_or_input(held: str, layout: str) -> None:
    A = LAYOUTS[layout](ADJACENCY)
    expected = reverse_over_reverse(graph(torch.mm, ADJACENCY), NODES, NODE_TARGET, mse)
    found = hk.hessian(graph(torch.mm, A, held), (NODES, A) if held == "input" else NODES, NODE_TARGET).matrix
    assert found.allclose(expected, rtol=0, atol=1e-13)


@sparse
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_what_is_wrong_with_a_sparse_tensor_is_said(layout: str) -> None:
    broken = ADJACENCY.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(hk.InputError, match="'adjacency' contains NaN or infinity"):
        hk.hessian(graph(torch.mm, LAYOUTS[layout](broken)), NODES, NODE_TARGET)
    module = graph(lambda A, z: A.mul_(2) @ z, LAYOUTS[layout](ADJACENCY))
    with pytest.raises(hk.InputError, match="changes its buffer 'adjacency'"):
        hk.hessian(module, NODES, NODE_TARGET)
    assert module.adjacency.to_dense().equal(ADJACENCY)
