"""Every public function answers wrong arguments with one line of its own, and leaves the module and the random state as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from curvature_reference import sample
from malformed import complaint, plainly_wrong, pool
from public_calls import CALLS, PATIENT, language_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import hessiankit as hk
from hessiankit.training import depth, distributed, monitoring, optim
from hessiankit.training import partition as parts

RESULTS = {
    "BlockTypes", "BoundsReport", "CheckReport", "CheckRow", "ConvergenceError", "CurvatureDiagonal", "DepthReport", "Derivation", "Estimate", "Forecast",
    "FrobeniusNorms", "Hessian", "HessianOperator", "HessiankitError", "InputError", "JacobianOperator", "Ledger", "LedgerReport", "OutOfMemoryError",
    "ScalarEstimates", "SharpnessReport", "Trace", "TraceError",
}  # fmt: skip
"""Public names that are made by the library, not by its user."""
STRUCTURE = {"NaN weight"}
UNREAD = {
    ("block_types", "model"): STRUCTURE, ("model_parts", "model"): STRUCTURE, ("named_slices", "module"): STRUCTURE,
    ("blockwise_lr", "model"): STRUCTURE, ("Monitor", "model"): STRUCTURE,
    ("angular_distance", "x"): {"NaN"}, ("angular_distance", "y"): {"NaN"},
    ("blockwise_lr", "power"): {"nan"}, ("blockwise_lr", "cap"): {"nan"},
    ("from_function", "params"): {"NaN", "no entries"},
    ("TransformerBlock", "rotary_theta"): {"nan"}, ("growth_laws", "theory"): {"number", "object"},
}  # fmt: skip
"""(function, argument) -> wrong values that are taken: values of a model whose structure alone is read, data that are read at the
first step, NaN that comes out as NaN, numbers for something that is not asked for, and words that are printed only."""


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    assert complaint(CALLS[name], CALLS[name].right()) is None


@pytest.mark.slow
@pytest.mark.parametrize("part", sample(range(3), 3))
@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument(name, part):
    call = CALLS[name]
    found = []
    for argument, what in list(wrong(name))[part::3]:
        arguments = call.right()
        arguments[argument] = pool(arguments[argument])[what]()
        if answer := complaint(call, arguments):
            found.append(f"{argument} = {what}: {answer}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_plainly_wrong_is_refused(name):
    call = CALLS[name]
    found = []
    for argument, right in call.right().items():
        spared = call.spared.get(argument, ())
        for what in plainly_wrong(right):
            if what not in spared and "*" not in spared:
                arguments = call.right()
                arguments[argument] = pool(arguments[argument])[what]()
                answer = complaint(call, arguments, refused=True)
                taken = what in UNREAD.get((name, argument), ())
                if answer != ("it is taken" if taken else None):
                    found.append(f"{argument} = {what}: {answer or 'it is refused, and UNREAD says that it is taken'}")
    assert not found, "\n".join(found)


def wrong(name: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, wrong value) of a function, without those that are right but slow."""
    call = CALLS[name]
    for argument, right in call.right().items():
        spared = call.spared.get(argument, ())
        if argument in PATIENT:
            spared = (*spared, "class", "identity", "no parameters")  # functions too: what they raise is their own
        yield from ((argument, what) for what in pool(right) if what not in spared and "*" not in spared)


def test_every_public_function_is_called():
    called = {name.partition("(")[0] for name in CALLS}
    assert set(hk.__all__) - RESULTS - called == set()
    functions = {n for room in (optim, depth, monitoring, parts) for n in room.__all__ if n[0].islower()}
    assert functions - called == set()
    assert distributed.__all__  # needs processes: tests/training/test_distributed.py


@pytest.fixture
def ranks() -> Iterator[None]:
    """Let this process be the first of two, whose collectives do nothing."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard of this torch (2.6) needs a GPU")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def freed(module: nn.Module) -> nn.Module:
    """Free the last parameter of a module, as FSDP frees the ones that it has gathered."""
    list(module.parameters())[-1].untyped_storage().resize_(0)
    return module


def distributed_tensors(module: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    return distribute_module(module, mesh)


SPREAD = {
    "by fully_shard": (fully_shard, "is sharded (FSDPModule), and only part"),
    "over a mesh": (distributed_tensors, "is sharded (DTensor), and only part"),
    "and freed": (freed, "was gathered by FSDP and freed, and none"),
}
ADVICE = "of its values is here; use hessiankit.training.distributed.hessian_operator for products, sharpness for block types, or"
STRUCTURAL = {"block_types", "model_parts", "named_slices", "blockwise_lr"}
"""Functions that read the structure of a model alone, which is the same for a sharded one."""


OF_RANKS = {"sharpness", "Monitor"}
"""Functions that measure a sharded model, together on all ranks."""


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (name, state)
        for name in CALLS
        for state in SPREAD
        if name not in STRUCTURAL and (state == "and freed" or name not in OF_RANKS)
    ],
)
@pytest.mark.usefixtures("ranks")
def test_sharded_modules_are_refused_before_their_memory_is_read(name: str, state: str) -> None:
    call, (spread, words) = CALLS[name], SPREAD[state]
    arguments = call.right()
    modules = [key for key, value in arguments.items() if isinstance(value, nn.Module)]
    for key in modules:
        spread(arguments[key])
    if modules:
        with pytest.raises(hk.InputError) as refusal:
            call.function(**arguments)
        assert words in str(refusal.value)
        assert ADVICE in str(refusal.value)
        assert str(refusal.value).startswith(tuple(f"{who}: " for who in (*call.names, "Monitor")))


@pytest.mark.usefixtures("ranks")
def test_structure_of_a_sharded_model_is_read() -> None:
    assert hk.block_types(fully_shard(language_model())).parts == hk.block_types(language_model()).parts


@pytest.mark.usefixtures("ranks")
def test_models_that_are_sharded_later_are_refused(tmp_path) -> None:
    model = language_model().eval()
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    options = {"loss": "cross_entropy", "params": "final_norm.*"}
    operators = [hk.hessian_operator(model, tokens, tokens, snapshot=snapshot, **options) for snapshot in (False, True)]
    v = torch.ones(operators[0].shape[0], dtype=torch.float64)
    before = operators[1] @ v
    function = hk.hessian_function(model, tokens, tokens, **options)
    monitor = hk.Monitor(model, (tokens, tokens), tmp_path / "run.jsonl")
    fully_shard(model)
    with pytest.raises(hk.InputError, match=r"'embedding\.W_E' has been given other values since"):
        operators[0] @ v
    assert torch.equal(operators[1] @ v, before)
    for call in (function, lambda: monitor.step(0)):
        with pytest.raises(hk.InputError, match=r"is sharded \(FSDPModule\)"):
            call()


@pytest.mark.usefixtures("ranks")
def test_parameters_that_fsdp_frees_after_a_call_are_noticed() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double())
    x, y = torch.ones(3, 2).double(), torch.ones(3, 1).double()
    model(x)  # which leaves the outermost module's parameters gathered
    layer = model[1]
    operator = hk.hessian_operator(layer, x, y, loss="mse", snapshot=False)
    model.reshard()
    with pytest.raises(hk.InputError, match=r"'weight' has been given other values since"):
        operator @ torch.ones(3).double()
