"""Several processes against one: the same numbers, on every rank the same bits, and errors that all ranks raise alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch

import hessiankit as hk
from hessiankit.diagnostics.sharpness import sharpness

ROOT = Path(__file__).parents[2]
EXACT = {"float64": 1e-12, "float32": 1e-6}
SIZES = (4, pytest.param(2, marks=pytest.mark.exhaustive))  # with four, one rank holds nothing, and a mesh has two axes
DTYPES = {"float64": torch.float64, "float32": torch.float32}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")]


def run(*command: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


LOST = {"last": (0, 0.0), "first": (1, 0.0), "stuck": (0, worker.STUCK), "tokens": (0, 0.0)}
"""Way -> the rank that is left, and how many seconds it waits at least."""


@pytest.fixture(scope="module", params=SIZES)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Return the number of processes, and what every rank of every way that was not lost has measured; see distributed_worker."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard of this torch (2.6) needs a GPU")
    folder, ways = tmp_path_factory.mktemp("distributed"), ["all", *LOST]
    run("-W", "ignore", str(ROOT / "tests" / "diagnostics" / "distributed_worker.py"), str(folder), str(request.param), *ways)
    return request.param, {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def found(by_rank: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Return the number of processes, and what rank 0 found; the others found the same bits."""
    size, results = by_rank
    everywhere = {name: one for name, one in results.items() if name.startswith("all-")}
    assert len(everywhere) == size
    assert all(other == everywhere["all-0"] for other in everywhere.values())
    return size, everywhere["all-0"]


def micro_batches(size: int) -> list[list[tuple[int, ...]]]:
    """Return the numbers of the sequences in each rank's micro-batches."""
    made, first = [], 0
    for held in worker.SHARES[size]:
        own = range(first, first + held)
        made.append([tuple(own[k : k + worker.MICRO_BATCH]) for k in range(0, held, worker.MICRO_BATCH)])
        first += held
    return made


def one_process(groups: list[tuple[int, ...]], made: torch.nn.Module, **options: Any) -> dict[str, Any]:
    """Measure what ranks do together, in this process, with the sequences grouped into the same micro-batches."""
    tokens, labels = worker.sequences()
    data = [(tokens[list(group)], labels[list(group)]) for group in groups]
    numbers = [number for group in groups for number in group]
    return worker.own(sharpness(made, data, numbers=numbers, **worker.OPTIONS, **options))


def assert_same_report(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    compared = 0
    for group in ("types", "layers", "tensors", "scale_free", "mean_of_tensors"):
        assert found[group].keys() == expected[group].keys()
        for name, one in expected[group].items():
            for field, value in one.items():
                if field not in ("low", "high"):  # exponentials of the standard error, which enlarge its rounding
                    close = pytest.approx(value, rel=tolerance, abs=tolerance * one["value"])
                    assert found[group][name][field] == close, (group, name, field)
                    compared += 1
    for here, there in zip(found["type_layers"], expected["type_layers"], strict=True):
        assert here["value"] == pytest.approx(there["value"], rel=tolerance)
    assert found["seen_rows"]["value"] == pytest.approx(expected["seen_rows"]["value"], rel=tolerance)
    for name in ("terms", "sequences", "micro_batches", "draws", "order", "seed", "frozen", "unused"):
        assert found[name] == expected[name], name
    assert compared > 200


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("way", ["plain", "ddp"])
def test_whole_models_equal_one_process_with_all_micro_batches(found: tuple[int, dict[str, Any]], way: str, name: str) -> None:
    size, results = found
    groups = [group for its in micro_batches(size) for group in its]
    expected = one_process(groups, worker.model(DTYPES[name]))
    assert_same_report(results["sharpness"][f"{way} {name}"], expected, EXACT[name])
    if name == "float64":
        assert results["sharpness"][f"{way} {name}"]["histograms"] == expected["histograms"]


def joint(size: int) -> list[tuple[int, ...]]:
    """Return the unions of the ranks' micro-batches, step by step."""
    own = micro_batches(size)
    steps = max(map(len, own))
    return [tuple(number for its in own if k < len(its) for number in its[k]) for k in range(steps)]


@pytest.mark.parametrize(("way", "name"), [("fsdp", "float64"), ("fsdp", "float32"), ("hsdp", "float64")])
def test_sharded_models_equal_one_process_with_joint_micro_batches(
    found: tuple[int, dict[str, Any]], way: str, name: str
) -> None:
    size, results = found
    expected = one_process(joint(size), worker.model(DTYPES[name]), parts=worker.some_cut(worker.model()))
    assert_same_report(results["sharpness"][f"{way} {name}"], expected, EXACT[name])
    assert results["sharpness"][f"gradients kept {name}"]
    if name == "float64":
        assert results["sharpness"][f"{way} {name}"]["histograms"] == expected["histograms"]


def test_labels_of_a_sharded_model_are_where_its_own_loss_has_them(found: tuple[int, dict[str, Any]]) -> None:
    size, results = found
    assert_same_report(results["sharpness"]["labelled"], one_process(joint(size), worker.Masked()), EXACT["float64"])


def test_numbers_say_which_sequences_a_rank_holds(found: tuple[int, dict[str, Any]]) -> None:
    size, results = found
    expected = one_process([tuple(range(rank, 7, size)) for rank in range(size)], worker.model())
    assert_same_report(results["sharpness"]["numbers"], expected, EXACT["float64"])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_operator_equals_that_of_one_process(found: tuple[int, dict[str, Any]], kind: str, name: str) -> None:
    _, results = found
    dtype = DTYPES[name]
    operator = hk.hessian_operator(worker.model(dtype).eval(), worker.sequences(), loss="cross_entropy", kind=kind)
    here = results["operator"][f"{kind} {name}"]
    V = worker.vectors(operator.shape[0]).to(dtype)
    for value, expected in ((here["product"], operator @ V), (here["gradient"], operator.gradient)):
        difference = (torch.tensor(value, dtype=dtype) - expected).abs().max()
        assert float(difference) <= EXACT[name] * float(expected.abs().max())
    assert here["loss"] == pytest.approx(operator.loss, rel=EXACT[name])


def test_eigenvalues_are_those_of_the_dense_hessian(found: tuple[int, dict[str, Any]]) -> None:
    _, results = found
    dense = hk.hessian(worker.model().eval(), worker.sequences(), loss="cross_entropy", params=["embedding.P", "final_norm.*"])
    top = results["operator"]["lanczos"]
    assert top["values"] == pytest.approx(dense.eigvalsh().flip(0)[:2].tolist(), rel=1e-12)
    assert max(top["residuals"]) <= 1e-12 * top["values"][0]
    assert results["operator"]["no convergence"].startswith("InputError: top_eigenvalues: ")
    assert "the block of vectors is '(" in results["operator"]["other vectors"]


def test_a_mistake_on_one_rank_is_the_same_line_on_all(found: tuple[int, dict[str, Any]]) -> None:
    for call, lines in found[1]["errors"].items():
        for expected, line in lines:
            assert line.startswith(f"InputError: {call}: {expected}")
            assert "\n" not in line


def test_the_page_s_program_prints_the_same_alone_and_with_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), flags=re.DOTALL)
    exec(compile(source, "program.py", "exec"), {"__name__": "program"})
    alone = capsys.readouterr().out.splitlines()
    program = tmp_path / "program.py"
    program.write_text(source)
    together = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)).splitlines()
    assert len(alone) > 10
    assert together[1:-1] == alone[1:-1]  # the first line ends with the time, the last one with a rounding error
    assert together[-1].split()[0] == alone[-1].split()[0]


@pytest.mark.parametrize("how", LOST)
def test_the_rank_that_is_left_stops(by_rank: tuple[int, dict[str, Any]], how: str) -> None:
    """At once where a rank is killed or fails, in the middle of a measurement; after its time-out where it is stuck."""
    left, least = LOST[how]
    found = by_rank[1][f"{how}-{left}"]
    assert found["said"].startswith(f"RankError: sharpness: rank {left} of 2 lost the others after ")
    assert "\n" not in found["said"]
    assert least <= found["seconds"] < 30  # the group's time-out is 60
