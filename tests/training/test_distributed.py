"""Several processes against one: the same numbers, on every rank the same bits, and errors that all ranks raise alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import sharded_models
import torch

import hessiankit as hk
from hessiankit.training.sharpness import sharpness

ROOT = Path(__file__).parents[2]
EXACT = 1e-12

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=280)


def crashed_beside_python(said: str) -> bool:
    """Tell whether a signal ended a process in a thread that runs no Python, as those of gloo are."""
    return "Fatal Python error" in said and "Current thread" not in said


LOST = {"first": (1, 0.0), "stuck": (0, worker.STUCK), "tokens": (0, 0.0), "set-up": (0, 0.0), "product": (0, 0.0)}
"""Way -> the rank that is left, and how many seconds it waits at least."""


def measured(folder: Path, size: int, *ways: str) -> dict[str, Any]:
    """Return what every rank of every way that was not lost has measured; see distributed_worker."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard of this torch (2.6) needs a GPU")
    command = ("-W", "ignore", str(ROOT / "tests" / "training" / "distributed_worker.py"), str(folder), str(size), *ways)
    done = run(*command)
    if crashed_beside_python(done.stderr):  # seen twice with torch 2.13: a double free in ~UnboundBuffer, without a known cause
        warnings.warn(
            f"a rank crashed in a thread of gloo; all are started again: {done.stderr[:200]}", RuntimeWarning, stacklevel=1
        )
        done = run(*command)
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(scope="module", params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks: of four one holds no data, and a mesh has two axes."""
    return int(request.param)


@pytest.fixture(scope="module")
def by_rank(size: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("distributed"), size, "all")


@pytest.fixture(scope="module")
def found(by_rank: dict[str, Any], size: int) -> dict[str, Any]:
    """Return what rank 0 found; the others found the same bits."""
    everywhere = {name: one for name, one in by_rank.items() if name.startswith("all-")}
    assert len(everywhere) == size
    own = [{name: value for name, value in one.items() if name != "memory"} for one in everywhere.values()]
    assert all(one == own[0] for one in own)
    return everywhere["all-0"]


def micro_batches(size: int) -> list[list[tuple[int, ...]]]:
    """Return the numbers of the sequences in each rank's micro-batches."""
    made, first = [], 0
    for held in worker.SHARES[size]:
        own = range(first, first + held)
        made.append([tuple(own[k : k + worker.MICRO_BATCH]) for k in range(0, held, worker.MICRO_BATCH)])
        first += held
    return made


def one_process(groups: list[tuple[int, ...]], *, made: torch.nn.Module, **options: Any) -> dict[str, Any]:
    """Measure what ranks do together, in this process, with the sequences grouped into the same micro-batches."""
    tokens, labels = worker.sequences()
    data = [(tokens[list(group)], labels[list(group)]) for group in groups]
    numbers = [number for group in groups for number in group]
    return worker.own(sharpness(made, data, numbers=numbers, **worker.OPTIONS, **options))


def joint(size: int) -> list[tuple[int, ...]]:
    """Return the unions of the ranks' micro-batches, step by step."""
    own = micro_batches(size)
    return [tuple(number for its in own if k < len(its) for number in its[k]) for k in range(max(map(len, own)))]


def every(size: int) -> list[tuple[int, ...]]:
    """Return the ranks' micro-batches, rank by rank."""
    return [group for its in micro_batches(size) for group in its]


CUT = {"parts": worker.some_cut(worker.model())}
WAYS: dict[str, tuple[Callable[[int], list[tuple[int, ...]]], dict[str, Any]]] = {
    # the micro-batches of one process that measures the same, and its options
    "plain": (every, {}),
    "ddp": (every, {}),
    "fsdp": (joint, CUT),
    "hsdp": (joint, CUT),
    "numbers": (lambda size: [tuple(range(rank, 7, size)) for rank in range(size)], {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_measure_what_one_process_does(found: dict[str, Any], size: int, way: str) -> None:
    groups, options = WAYS[way]
    here, expected, compared = found["sharpness"][way], one_process(groups(size), **{"made": worker.model(), **options}), 0
    for group in ("types", "layers", "tensors", "scale_free", "mean_of_tensors"):
        assert here[group].keys() == expected[group].keys()
        for name, one in expected[group].items():
            for field, value in one.items():
                if field not in ("low", "high"):  # exponentials of the standard error, which enlarge its rounding
                    close = pytest.approx(value, rel=EXACT, abs=EXACT * one["value"])
                    assert here[group][name][field] == close, (group, name, field)
                    compared += 1
    for mine, theirs in zip(here["type_layers"], expected["type_layers"], strict=True):
        assert mine["value"] == pytest.approx(theirs["value"], rel=EXACT)
    assert here["seen_rows"]["value"] == pytest.approx(expected["seen_rows"]["value"], rel=EXACT)
    for name in ("terms", "sequences", "micro_batches", "draws", "order", "seed", "frozen", "unused", "histograms"):
        assert here[name] == expected[name], name
    assert compared > 200
    assert found["sharpness"]["gradients kept"]


def test_a_monitor_of_a_sharded_model_measures_what_one_process_does(found: dict[str, Any], tmp_path: Path) -> None:
    made, seen = worker.model(), found["sharpness"]["monitor"]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    what = {"norms": {}, "sharpness": {"draws": worker.DRAWS}}
    monitor = hk.Monitor(made, worker.sequences(), tmp_path / "run.jsonl", every=1, what=what)
    for step in range(3):
        here, expected = seen["records"][step], monitor.step(step)
        assert expected is not None
        assert here["loss"] == pytest.approx(expected["loss"], rel=EXACT)
        assert here["norms"]["types"] == pytest.approx(expected["norms"]["types"], rel=EXACT)
        for name, one in expected["sharpness"]["types"].items():
            assert here["sharpness"]["types"][name]["value"] == pytest.approx(one["value"], rel=EXACT)
        made(worker.sequences()[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen["lines"] == seen["records"]
    assert "'eigenvalue' is measured of whole models, and this one is sharded" in seen["refused"]
    assert "mine at step 0 failed: RankError: monitor: on rank" in seen["failure"]
    assert "ZeroDivisionError" in seen["failure"]


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_operator_equals_that_of_one_process(found: dict[str, Any], kind: str) -> None:
    operator = hk.hessian_operator(worker.model().eval(), worker.sequences(), loss="cross_entropy", kind=kind)
    here, V = found["operator"][kind], worker.vectors(operator.shape[0])
    for value, expected in ((here["product"], operator @ V), (here["gradient"], operator.gradient)):
        difference = (torch.tensor(value, dtype=torch.float64) - expected).abs().max()
        assert float(difference) <= EXACT * float(expected.abs().max())
    assert here["loss"] == pytest.approx(operator.loss, rel=EXACT)


def test_eigenvalues_are_those_of_the_dense_hessian(found: dict[str, Any]) -> None:
    dense = hk.hessian(worker.model().eval(), worker.sequences(), loss="cross_entropy", params=["embedding.P", "final_norm.*"])
    top = found["operator"]["lanczos"]
    assert top["values"] == pytest.approx(dense.eigvalsh().flip(0)[:2].tolist(), rel=1e-12)
    assert max(top["residuals"]) <= 1e-12 * top["values"][0]
    operator = hk.hessian_operator(
        worker.model().eval(), worker.sequences(), loss="cross_entropy", params=["embedding.P", "final_norm.*"]
    )
    assert found["operator"]["trace"] == pytest.approx(hk.scalar_estimates(operator, products=20).trace.value, rel=1e-12)
    solution = operator.solve(operator.gradient, damping=50.0).x
    assert found["operator"]["solution"] == pytest.approx(solution.tolist(), rel=1e-7, abs=1e-7 * float(solution.abs().max()))
    assert "the block of vectors is '(" in found["operator"]["other vectors"]
    for expected, line in found["operator"]["other options"]:
        assert f": {expected}; expected the same on every rank" in line


@pytest.mark.parametrize(("name", "kind"), sharded_models.KINDS)
def test_products_of_sharded_models_are_those_of_one_process(found: dict[str, Any], name: str, kind: str) -> None:
    tokens, labels = sharded_models.sequences()
    operator = hk.hessian_operator(sharded_models.MODELS[name](), tokens, labels, loss="cross_entropy", kind=kind)
    v, here = sharded_models.vector(dict(operator.shapes)), found["sharded"][f"{name}, {kind}"]

    def agrees(value: dict[str, Any], expected: dict[str, torch.Tensor], tolerance: float) -> bool:
        pairs = [(torch.tensor(value[n], dtype=torch.float64), x) for n, x in expected.items()]
        return max(float((a - b).abs().max()) for a, b in pairs) <= tolerance * max(float(b.abs().max()) for _, b in pairs)

    assert agrees(here["product"], operator @ v, EXACT)
    assert here["loss"] == pytest.approx(operator.loss, rel=EXACT)
    if "eigenvalues" in here:
        matrix = operator.to_matrix()
        spectrum = hk.spectrum(operator, k=2, tol=EXACT, directions=2, steps=6, method="lanczos")
        assert here["trace"] == pytest.approx(spectrum.trace.value, rel=EXACT)
        assert here["rank"] == pytest.approx(spectrum.effective_rank.value, rel=1e-9)
        for seen, products in zip(here["estimates"], sharded_models.PRODUCTS, strict=True):
            expected = sharded_models.numbers(hk.scalar_estimates(operator, products=products))
            largest = max(map(abs, expected.values()))
            assert seen == pytest.approx(expected, rel=1e-9, abs=EXACT * largest)
        assert here["eigenvalues"] == pytest.approx(torch.linalg.eigvalsh(matrix).flip(0)[:2].tolist(), rel=EXACT)
        flat = torch.cat([x.reshape(-1) for x in v.values()])
        shift = (1.0 if kind == "ggn" else 50.0) * torch.eye(len(flat), dtype=torch.float64)
        exact = torch.linalg.solve(matrix + shift, flat).split([x.numel() for x in v.values()])
        solution = {n: x.reshape(v[n].shape) for n, x in zip(v, exact, strict=True)}
        assert agrees(here["solution"], solution, EXACT)


def test_a_sharded_model_in_half_precision_has_products_within_its_rounding(found: dict[str, Any]) -> None:
    exact = sharded_models.MODELS["tied"]().to(torch.bfloat16).double()
    operator = hk.hessian_operator(exact, *sharded_models.sequences(), loss="cross_entropy")
    expected = operator @ sharded_models.vector(dict(operator.shapes))
    here = {n: torch.tensor(x, dtype=torch.float64) for n, x in found["sharded"]["half precision"].items()}
    error = sum(float((here[n] - x).square().sum()) for n, x in expected.items()) ** 0.5
    assert 1e-5 < error / sum(float(x.square().sum()) for x in expected.values()) ** 0.5 < 4 * torch.finfo(torch.bfloat16).eps


def test_no_rank_holds_more_than_its_pieces_and_a_few_layers(by_rank: dict[str, Any], size: int) -> None:
    """The model has five layers: one is there in the calls of set-up, and parameters, directions and sums of 2/3 in a product."""
    for rank in range(size):
        memory = by_rank[f"all-{rank}"]["memory"]
        assert 0.0 < memory["set-up"] <= 1.0
        assert 1.0 < memory["product"] <= 2.25


FAILURES = {
    "the right-hand side": "InputError: solve: on {}: b has shape (",
    "a function of the user's": "RankError: solve: on {}: ValueError: no memory here",
    "an option": "InputError: spectrum: on {}: ",
    "a vector": "InputError: hessian_operator: on {}: ",
}


@pytest.mark.parametrize("of", ["operator", "sharded"])
def test_a_failure_of_one_rank_ends_the_call_on_all(found: dict[str, Any], size: int, of: str) -> None:
    for mistake, line in found[of]["one rank"].items():
        assert line.startswith(FAILURES[mistake].format(f"rank {size - 1} of {size}"))


def test_what_needs_whole_vectors_is_refused(found: dict[str, Any]) -> None:
    lines = found["sharded"]["refused"]
    assert all(line.startswith("InputError: hessian_operator: ") for line in lines[:3])
    assert all("need whole vectors, and the operator is of a sharded model" in line for line in lines[3:])


def test_a_sharded_model_that_changes_is_noticed(found: dict[str, Any]) -> None:
    assert "has been given other values since" in found["sharded"]["changed"]


def test_a_mistake_on_one_rank_is_the_same_line_on_all(found: dict[str, Any]) -> None:
    for call, lines in found["errors"].items():
        for expected, line in lines:
            assert line.startswith(f"InputError: {call}: {expected}")
            assert "\n" not in line


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("lost"), 2, *LOST)


@pytest.mark.parametrize("how", LOST)
def test_the_rank_that_is_left_stops(lost: dict[str, Any], how: str) -> None:
    """At once where a rank is killed or fails, in the middle of a measurement; after its time-out where it is stuck."""
    left, least = LOST[how]
    found = lost[f"{how}-{left}"]
    call = "hessian_operator" if how in ("product", "set-up") else "sharpness"
    assert found["said"].startswith(f"RankError: {call}: rank {left} of 2 lost the others after ")
    assert "\n" not in found["said"]
    assert least <= found["seconds"] < 30  # the group's time-out is 60


@pytest.mark.parametrize("thread", ["of Python", "without"])
def test_a_crash_is_told_from_one_in_a_thread_that_runs_no_python(thread: str) -> None:
    begin = "import ctypes, os, time; c, t = ctypes.CDLL(None), ctypes.c_ulong(); "
    here, beside = "os.abort()", "c.pthread_create(ctypes.byref(t), None, c.abort, None); time.sleep(60)"
    done = run("-c", begin + (here if thread == "of Python" else beside))
    assert done.returncode < 0
    assert crashed_beside_python(done.stderr) == (thread == "without")
