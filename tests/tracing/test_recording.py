"""What a forward pass is recorded as: the operations of torch's tracer, autograd's own cuts, and never a silent constant."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, in_thread
from operation_cases import cubed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hessiankit as hk
from hessiankit.tracing import recording
from hessiankit.tracing.recording import can_record

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


Halved = cubed("Halved", lambda x, g: g * x, forward=lambda x: x * x)


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


def gradient_of_data(s: Formula, x: Tensor) -> Tensor:
    return torch.tanh(torch.func.grad(lambda a: (a**3).sum())(x) @ s.W) * s.v


def by_checkpoint(s: Formula, x: Tensor) -> Tensor:
    return checkpoint(lambda a: torch.tanh(a @ s.W) * s.v, x, use_reentrant=False)  # type: ignore[no-any-return]


def by_branch(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    assert torch.isfinite(y).all()
    return torch.tanh(y) * s.v if y.sum() > 0 else torch.sin(y) * s.v


def within_itself(s: Formula, x: Tensor) -> Tensor:
    return torch.tanh(x @ s.W) * s.v * hk.hessian(INNER, X, X[:, :2]).matrix.sum()


INNER = nn.Linear(4, 2).double()
EXACT: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "data": lambda s, x: (y := torch.tanh(x @ s.W)) * y.data * s.v,
    "detach": lambda s, x: (y := torch.tanh(x @ s.W)) * y.detach() * s.v,
    "data of a parameter": lambda s, x: torch.tanh(x @ s.W.data) * s.v * s.v.data,
    "a parameter of a parameter": lambda s, x: torch.tanh(x @ nn.Parameter(s.W)) * s.v,
    "an array of what is detached": lambda s, x: torch.tanh(x @ s.W) * s.v * torch.from_numpy(s.v.detach().numpy()),
    "gradients off and on": inner_gradient_switch,
    "gradients off for a view of the same memory": lambda s, x: (
        (y := x @ s.W) * torch.no_grad()(lambda z: z.contiguous())(y) * s.v
    ),
    "detached and differentiated again": lambda s, x: torch.tanh((x @ s.W).detach().requires_grad_()) * s.v,
    "a tensor twice": lambda s, x: torch.tanh(x @ s.W) * (s.v * s.v) + torch.add(s.v, s.v),
    "a constant written into": written_constant,
    "out=": written_out,
    "vmap of data": twice,
    "vmap of data, written into": mask_written_into,
    "gradient of data": gradient_of_data,
    "other data of a constant": given_data,
    "another thread on data": lambda s, x: torch.tanh(in_thread(lambda: torch.sin(x)) @ s.W) * s.v,
    "a function of one's own on data": lambda s, x: torch.tanh(Halved.apply(x) @ s.W) * s.v,
    "checkpoint": by_checkpoint,
    "branch": by_branch,
    "sorted by a parameter": lambda s, x: torch.tanh(x @ s.W)[:, s.v.argsort()] * s.v,
    "rows one by one": lambda s, x: torch.stack([torch.tanh(row * w) * s.v for row, w in zip(x, s.W, strict=False)]),
    "its own Hessian": within_itself,
    "cosine similarity": lambda s, x: F.cosine_similarity(x @ s.W, s.v[None], -1)[:, None] * s.v,
    "addcmul_": lambda s, x: torch.tanh((x @ s.W).addcmul_(torch.tanh(x * s.v), x, value=0.5)),
    "addcmul_ into a part": lambda s, x: torch.tanh(_part(x @ s.W, lambda part: part.addcmul_(x[1:], x[1:] * s.v))),
    "lerp_": lambda s, x: torch.tanh((x @ s.W).lerp_(x * s.v, 0.3)),
    "addmm_": lambda s, x: torch.tanh((x @ s.W).addmm_(x * s.v, s.W)),
    "addcdiv_": lambda s, x: torch.tanh((x @ s.W).addcdiv_(x, s.v * s.v + 1)),
    "square_": lambda s, x: torch.tanh((x @ s.W).square_()) * s.v,
}


def _part(y: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(y[1:])
    return y


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


def by_reentrant_checkpoint(s: Formula, x: Tensor) -> Tensor:
    return checkpoint(lambda w: torch.tanh(x @ w) * s.v, s.W, use_reentrant=True)  # type: ignore[no-any-return]


def raised(s: Formula, x: Tensor) -> Tensor:
    raise KeyError("a mistake of the module")


REFUSED: dict[str, tuple[Callable[[Formula, Tensor], Tensor], str]] = {
    "a function of one's own": (
        lambda s, x: Halved.apply(x @ s.W) * s.v,
        "first derivative of the loss is off .* HalvedBackward",
    ),
    "reentrant checkpoint": (by_reentrant_checkpoint, "a reentrant checkpoint hides .* pass use_reentrant=False"),
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
    "an exception": (raised, "raised KeyError: 'a mistake of the module'"),
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


@pytest.mark.parametrize("missing", ["PreDispatch", "dispatcher"])
def test_a_torch_without_the_internals_is_named(monkeypatch, missing):
    class Without:
        """torch._C less one name."""

        def __init__(self, whole: Any) -> None:
            self._whole = whole

        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            found = getattr(self._whole, name)
            return Without(found) if name in ("DispatchKey", "_TorchDispatchModeKey") else found

    assert can_record()
    with monkeypatch.context() as patch:
        if missing == "dispatcher":
            patch.setattr(recording, "enable_python_dispatcher", None)
        else:
            patch.setattr(recording, "_INTERNALS", Without(torch._C))
        assert not can_record()
        with pytest.raises(hk.TraceError, match=r"torch .* lacks internals that recording a module stands on"):
            hk.hessian(formula(lambda s, x: torch.tanh(x @ s.W)[:, :2] * s.v[1:3]), X, X[:, :2])
    assert can_record()
