"""Plans that are replayed without Python in between, beside the same operations called one by one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hessiankit as hk
from hessiankit.engine.plan import ExecutionPlan, make_plan
from hessiankit.engine.recorder import recording
from hessiankit.engine.replay import GuardError, Tape
from hessiankit.support import kernels as library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")]
DOUBLE = torch.float64
CACHED = (library._found, library._found_replayer)


@pytest.fixture(autouse=True)
def replayer(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.build()
    assert library.build_replayer() == ""
    torch.manual_seed(0)
    yield
    for cached in CACHED:
        cached.cache_clear()


def planned(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[ExecutionPlan, Tensor]:
    """A plan of f, and a tensor for its result."""
    total = torch.zeros_like(f(x))
    with recording([x, total]) as record:
        total += f(x)
    return make_plan(record, [x], total, []), torch.zeros_like(total)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: (x / 3 - 2) * 0.1 + x.sum() / 7,
    "a scalar by a number": lambda x: x.sum() * 0.1 / 3,
    "an integer": lambda x: (x > 0).sum() // 2 * 3 + x.argmax(-1),
    "text": lambda x: torch.nn.functional.gelu(x, approximate="tanh") + torch.nn.functional.gelu(x),
    "lists": lambda x: torch.cat([x, x.exp()]).sum((0,), keepdim=True).expand(3, -1),
    "several results": lambda x: torch.nn.functional.layer_norm(x, (4,)) + x.max(0).values + x.topk(2).values.sum(),
    "a type": lambda x: x.sum(dtype=torch.float64) + x.to(torch.float64),
    "where": lambda x: torch.where(x > 0.2, x, x.new_zeros(())).square_().clamp_(max=0.5),
    "products": lambda x: torch.addmm(x, x @ x.mT, x, beta=0.5, alpha=2) + torch.softmax(x, -1).cumsum(0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_digits_that_they_give_by_themselves(name: str, dtype: torch.dtype) -> None:
    f, x = OPERATIONS[name], torch.randn(3, 4, dtype=dtype)
    plan, out = planned(f, x)
    assert any(isinstance(call, Tape) for call in plan._calls)
    for _ in range(2):
        x.copy_(torch.randn(3, 4))
        plan.run(out)
        assert torch.equal(out, f(x))


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor, str]]] = {
    "block": lambda: (hk.TransformerBlock(8, 12, n_heads=2), torch.randn(2, 5, 8), torch.randn(2, 5, 8), "mse"),
    "model": lambda: (
        hk.Transformer(7, 4, 6, n_layers=1, n_heads=2, causal=True, max_len=6),
        *(torch.randint(7, (2, 5)) for _ in range(2)),
        "cross_entropy",
    ),
}


@pytest.mark.parametrize(("name", "compiled"), [("block", False), ("block", True), ("model", True)])
def test_hessians_are_those_of_single_calls(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, y, loss = MODULES[name]()
    module.double()
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    if not compiled:
        monkeypatch.setattr(library, "_found", lambda: None)
    replayed = hk.hessian_function(module, x, y, loss=loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_found_replayer", lambda: None)
        called = hk.hessian_function(module, x, y, loss=loss)
    for function, count in ((replayed, 1), (called, 0)):
        assert function.plan is not None
        assert any(isinstance(call, Tape) for call in function.plan._calls) is bool(count)
    for _ in range(2):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.1 * torch.randn_like(p))
        found = replayed().matrix
        assert torch.equal(found, called().matrix)
        expected = hk.hessian(module, x, y, loss=loss).matrix
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_what_fails_is_raised_as_by_its_own_call() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], dtype=DOUBLE)
    plan, out = planned(lambda x: x.exp().index_select(0, x.long()) * 2, x)
    x[1] = 5.0
    with pytest.raises(IndexError, match="index out of range"):
        plan.run(out)
    x[1] = 0.0
    plan.run(out)
    assert torch.equal(out, x.exp()[x.long()] * 2)


def test_another_shape_is_a_decision_that_comes_out_otherwise() -> None:
    x = torch.tensor([1.0, -1.0, 2.0], dtype=DOUBLE)
    plan, out = planned(lambda x: x.masked_select(x > 0).exp().sum(), x)
    x[2] = 3.0
    plan.run(out)
    assert out.item() == pytest.approx(x[[0, 2]].exp().sum().item(), rel=1e-15)
    x[2] = -3.0
    with pytest.raises(GuardError):
        plan.run(out)


def test_who_looks_on_sees_every_operation() -> None:
    x = torch.randn(3, 4, dtype=DOUBLE)
    plan, out = planned(lambda x: x @ x.mT @ x, x)
    with FlopCounterMode(display=False) as counter:
        plan.run(out)
    assert counter.get_total_flops() == 2 * (3 * 4 * 3 + 3 * 3 * 4)


def test_turned_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    plan, _ = planned(lambda x: x.exp().sin(), torch.ones(2))
    assert not any(isinstance(call, Tape) for call in plan._calls)


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "replay.cpp"
    broken.write_text("no C++\n")
    monkeypatch.setattr(library, "_REPLAYER", broken)
    assert library.build_replayer() != ""
