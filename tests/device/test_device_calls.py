"""Every public call on the device gives the CPU's numbers, in both precisions, whatever torch's default device is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from device_cases import CALLS, DEVICE, TOLERANCE, cases, default_device, product
from robustness.public_calls import CALLS as PUBLIC
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import hessiankit as hk
from hessiankit.support.torch_state import preserved_state

if DEVICE == "pretended":
    import pretended
PRETENDED = pytest.mark.skipif(DEVICE != "pretended", reason="only the pretended device has a limit that is set")
DEFAULT = pytest.mark.parametrize("default", [None, DEVICE], ids=["default cpu", "default device"])
SETTINGS = [
    ("convolutions", torch.float64, None),
    ("recurrent", torch.float64, DEVICE),
    ("attention", torch.float32, DEVICE),
    ("convolutions", torch.float32, None),
]


def compare(here: Any, there: Any, tolerance: float) -> None:
    """Compare numbers, tensors and text of the two devices."""
    if isinstance(here, (Tensor, float, list)):
        x, y = (torch.as_tensor(z).detach().cpu().double() for z in (here, there))
        assert float((x - y).abs().max()) <= tolerance * float(x.abs().max())
    else:
        assert here == there


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("model", "dtype", "default"), SETTINGS)
def test_a_call_equals_the_cpu(model: str, call: str, default: str | None, dtype: torch.dtype) -> None:
    case = cases(dtype)[model]
    here = CALLS[call](case)
    moved = case.on(DEVICE)
    with default_device(default):
        there = CALLS[call](moved)
    if isinstance(there, Tensor) and call not in ("frobenius_norms", "spectrum in a metric"):  # these are numbers for the host
        assert there.device.type == DEVICE
    compare(here, there, TOLERANCE[dtype])


@DEFAULT
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_formulas_and_bounds_equal_the_cpu(placement: str, default: str | None) -> None:
    case = cases(torch.float64)["encoder"]
    block = hk.TransformerBlock(8, 6, placement=placement).double()
    formula, bounds = hk.derive(block).dense(), hk.bounds(block, *case.data).values["whole"]
    there = case._replace(module=block).on(DEVICE)
    with default_device(default):
        compare(formula, hk.derive(there.module).dense(), 1e-9)
        moved = hk.bounds(there.module, *there.data).values["whole"]
    assert moved == pytest.approx(bounds, rel=1e-9)


@DEFAULT
def test_functions_of_formulas_equal_the_cpu(default: str | None) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.LayerNorm(3)).double()
    x, names = torch.randn(2, 4).double(), ("0.weight", "2.weight")

    def numbers(device: str) -> list[Tensor]:
        with default_device(default if device == DEVICE else None):
            moved = module.to(device)
            derived = hk.derive(moved, wrt=names, inputs=x.to(device))
            W, b, *_ = (p.detach() for p in moved.parameters())
            result = derived.function("torch")(W, b, x.to(device))  # of the gain the second derivative is independent
            assert result.device.type == W.device.type
            return [derived.dense(), result]

    for here, there in zip(numbers("cpu"), numbers(DEVICE), strict=True):
        compare(here, there, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_functions_of_torch_equal_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, weight, labels = torch.randn(2, 2, 5, 4, dtype=dtype), torch.randn(7, 4, dtype=dtype), torch.randint(7, (2, 2, 5))

    def twice(device: str | None) -> list[Tensor]:
        x, w = (t.clone().to(device or "cpu").requires_grad_() for t in (q, weight))
        y = hk.scaled_dot_product_attention(x, x, x, is_causal=True)
        loss = hk.linear_cross_entropy(y, w, labels.to(x.device))
        slopes = torch.autograd.grad(loss, (x, w), create_graph=True)
        return [loss, *slopes, *torch.autograd.grad(sum(g.cos().sum() for g in slopes), (x, w))]

    for a, b in zip(twice(None), twice(DEVICE), strict=True):
        assert b.device.type == DEVICE
        compare(a, b, TOLERANCE[dtype] / 100)


def test_two_devices_are_one_clear_error() -> None:
    case = cases(torch.float64)["encoder"]
    module = case.on(DEVICE).module
    with pytest.raises(hk.InputError, match=f"inputs is on cpu, the parameters are on {DEVICE}"):
        hk.hessian(module, *case.data, loss=case.loss)


@PRETENDED
def test_too_large_for_the_device_says_what_to_do() -> None:
    case = cases(torch.float64)["encoder"].on(DEVICE)
    with pretended.memory_limit(2**18), pytest.raises(hk.OutOfMemoryError, match="select parameters with params="):
        hk.hessian(case.module, *case.data, loss=case.loss)


@pytest.mark.parametrize("model", ["encoder", "convolutions"])
def test_tensor_float_32_is_left_out(model: str) -> None:
    """With products that may drop 13 bits the results are those without, to the last bit, and the setting is as it was."""
    case = cases(torch.float32)[model].on(DEVICE)
    exact = hk.hessian(case.module, *case.data, loss=case.loss).matrix
    x = torch.full((2, 2), 1.0001, device=DEVICE)
    torch.set_float32_matmul_precision("high")
    try:
        coarse = x @ x
        found = hk.hessian(case.module, *case.data, loss=case.loss).matrix
        products = CALLS["hessian_operator"](case)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(coarse, x @ x), "the device does not round"
    assert torch.equal(found, exact)
    assert torch.equal(products, CALLS["hessian_operator"](case))


@PRETENDED
def test_a_device_that_runs_out_on_the_way_says_what_to_do() -> None:
    case = cases(torch.float64)["encoder"].on(DEVICE)
    with pretended.memory_limit(2**12), pytest.raises(hk.OutOfMemoryError, match=r"hessian_operator: .*out of memory.*params="):
        hk.hessian_operator(case.module, *case.data, loss=case.loss)


def test_the_random_state_of_the_device_is_put_back() -> None:
    model = torch.nn.Linear(2, 2).to(DEVICE)
    module = torch.get_device_module(DEVICE)
    before = module.get_rng_state()
    with preserved_state(model):
        torch.rand(2, device=DEVICE)
        assert not torch.equal(before, module.get_rng_state())
    assert torch.equal(before, module.get_rng_state())


def test_labels_are_drawn_by_deterministic_algorithms() -> None:
    case = cases(torch.float64)["language"]
    torch.use_deterministic_algorithms(True)
    try:
        here, there = (CALLS["hessian_operator"](case.on(device)) for device in ("cpu", DEVICE))
        drawn = [product(hk.hessian_operator(c.module, *c.data, loss=c.loss, kind="fisher-mc")) for c in (case, case.on(DEVICE))]
    finally:
        torch.use_deterministic_algorithms(False)
    compare(here, there, 1e-9)
    compare(*drawn, 1e-9)


# Every public call with its own arguments, moved to the device --------------------------------------------------------

HOST = ("bounds", "TransformerBlock", "Transformer", "VisionTransformer")
"""What makes modules, which a user moves."""
DRAWN = ("sharpness", "blockwise_lr")
"""What draws on the device, whose numbers are not those that the CPU draws from the same seed."""
if DEVICE != "pretended":  # which has the CPU's generator
    DRAWN += ("spectrum",)
TIMES = ("seconds", "environment", "memory")


def moved(x: Any, device: str, dtype: torch.dtype) -> Any:
    """Return tensors, modules and operators' arguments on a device; other things as they are."""
    if isinstance(x, Tensor):
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return x.to(device, dtype) if isinstance(x, nn.Module) else x


def numbers(x: Any) -> Iterator[float]:
    """Yield the numbers of a result, in its order."""
    if isinstance(x, Tensor):
        yield from x.detach().cpu().double().flatten().tolist()
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from () if key in TIMES else numbers(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from numbers(value)
    elif isinstance(x, float):
        yield x
    elif hasattr(x, "to_dict"):
        yield from numbers(x.to_dict())


def functions() -> list[str]:
    """The calls that take a tensor or a module."""
    taken = []
    for name, call in PUBLIC.items():
        leaves = torch.utils._pytree.tree_leaves(call.right())
        if name not in HOST and any(isinstance(x, (Tensor, nn.Module)) for x in leaves):
            taken.append(name)
    return taken


@pytest.mark.parametrize(
    ("dtype", "default"),
    [(torch.float64, None), (torch.float64, DEVICE), (torch.float32, None)],
    ids=["float64", "float64 on the default device", "float32"],
)
@pytest.mark.parametrize("name", functions())
def test_a_public_call_equals_the_cpu(name: str, dtype: torch.dtype, default: str | None) -> None:
    call = PUBLIC[name]
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        arguments = tree_map(lambda x, device=device: moved(x, device, dtype), call.right())
        if isinstance(arguments.get("optimizer"), torch.optim.Optimizer):  # moving makes new parameters
            arguments["optimizer"] = torch.optim.SGD(arguments.get("module", arguments.get("model")).parameters(), lr=0.1)
        with default_device(default if device == DEVICE else None):
            results.append(list(numbers(call.function(**arguments))))
    here, there = results
    if name in DRAWN:
        assert there
        assert all(map(math.isfinite, there))
        return
    assert len(here) == len(there)
    tolerance = 1e-7 if dtype == torch.float64 else 2e-3
    scale = max((abs(x) for x in here if math.isfinite(x)), default=0.0)
    apart = [(a, b) for a, b in zip(here, there, strict=True) if not (a == b or (a != a and b != b))]
    assert all(abs(a - b) <= tolerance * scale for a, b in apart), apart[:3]
