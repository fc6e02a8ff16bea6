"""What one rank does in the tests of hessiankit.training.distributed.

``python tests/training/distributed_worker.py FOLDER SIZE WAY ...`` starts so many ranks for the way "all", and two for every
other, as srun would: torchrun's agent would stop a rank that is left before it can speak. They are forked, as importing torch takes
longer than what they do; each writes what it found into ``WAY-RANK.json``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sharded_models
import torch
import torch.distributed as dist
from meter import BytesAlive, PeakBytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hessiankit as hk
from hessiankit.request.state import HASH_WORDS
from hessiankit.training import distributed as hd
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.sharpness import SharpnessReport

VOCABULARY, LENGTH = 13, 6
SHARES = {2: [3, 4], 4: [3, 0, 1, 3]}
"""How many of the seven sequences each rank holds: uneven, and with four ranks one holds none."""
MICRO_BATCH = 2
DRAWS = 2
OPTIONS = {"draws": DRAWS, "seed": 5, "histograms": True}
EXACT = 1e-12
"""Tolerance of eigenvalues' residuals."""
STUCK = 2.0
"""Seconds that a rank waits for one that stands still."""


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small transformer with gains and biases away from their initial values."""
    torch.manual_seed(3)
    made = hk.Transformer(VOCABULARY, 8, 12, 2, 2, placement="pre", max_len=LENGTH, causal=True, bias=True).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return made.to(dtype)


def sequences() -> tuple[Tensor, Tensor]:
    """Return the tokens (7, 6), and labels of which some do not count."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCABULARY - 2, (7, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (7, LENGTH), generator=generator)
    labels[1, 2:] = labels[5, :1] = -100
    return tokens, labels


def share(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and labels."""
    cuts = SHARES[size]
    first = sum(cuts[:rank])
    tokens, labels = sequences()
    return tokens[first : first + cuts[rank]], labels[first : first + cuts[rank]]


def vectors(size: int) -> Tensor:
    """Return three vectors to multiply with."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def sharded(made: nn.Module, **options: Any) -> nn.Module:
    """Return the model with every block, and the rest, spread over the ranks."""
    from torch.distributed.fsdp import fully_shard

    for block in made.blocks:
        fully_shard(block, **options)
    return fully_shard(made, **options)


def some_cut(made: nn.Module) -> tuple[Part, ...]:
    """Return the parts of a model with two of its weights cut along either axis, as fused ones are, against the shards."""
    found = []
    for part in model_parts(made):
        axis = {"blocks.0.attention.W_Q": 0, "blocks.1.attention.W_K": 1}.get(part.parameter)
        if axis is None:
            found.append(part)
            continue
        for segments in (((0, 1), (3, 6)), ((1, 3), (6, 8))):
            found.append(replace(part, axis=axis, segments=segments, size=sum(b - a for a, b in segments) * part.size // 8))
    return tuple(found)


def over_ranks(made: nn.Module, data: Any, **options: Any) -> SharpnessReport:
    """Measure on all ranks: of a sharded model the plain call does."""
    is_spread = any(isinstance(p, DTensor) for p in made.parameters())
    return hk.sharpness(made, data, **{"group": None if is_spread else dist.group.WORLD, **options})


def own(report: SharpnessReport) -> dict[str, Any]:
    """Return a report without its time."""
    return {name: value for name, value in report.to_dict().items() if name != "seconds"}


def caught(work: Callable[[], Any]) -> str:
    """Return the error that work raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sharpness_cases(rank: int, size: int) -> dict[str, Any]:
    """Measure sharpness in every way."""
    tokens, labels = share(rank, size)
    data = (tokens, labels) if len(tokens) else []
    options = {**OPTIONS, "micro_batch": MICRO_BATCH}
    plain, spread, free = model(), sharded(model()), model()
    spread.embedding.W_E.grad = torch.ones_like(spread.embedding.W_E)
    with torch.no_grad():
        spread(sequences()[0][:1])  # after which the outermost parameters are whole
    strided = (sequences()[0][rank::size], sequences()[1][rank::size])
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = sharded(free, mesh=mesh, ignored_params={free.final_norm.weight})
    found = {
        "plain": own(over_ranks(plain, data, **options)),
        "ddp": own(over_ranks(nn.parallel.DistributedDataParallel(model()), data, **options)),
        "fsdp": own(over_ranks(spread, data, parts=some_cut(plain), **options)),
        "hsdp": own(over_ranks(replicas, data, parts=some_cut(plain), **options)),
        "numbers": own(over_ranks(model(), strided, numbers=range(rank, 7, size), **OPTIONS)),
    }
    found["monitor"] = monitored(rank, size)
    kept = spread.embedding.W_E.grad
    found["gradients kept"] = kept is not None and bool((kept.full_tensor() == 1).all()) and spread.training
    return found


def monitored(rank: int, size: int) -> dict[str, Any]:
    """Follow two steps of training of a sharded model; return the lines of the file, and what cannot be measured."""
    tokens, labels = share(rank, size)
    made = sharded(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as own_folder:
        (folder,) = common([own_folder] if rank == 0 else [])
        what = {"norms": {}, "sharpness": {"draws": DRAWS}}
        data, path = (tokens, labels) if len(tokens) else [], f"{folder}/run.jsonl"
        monitor = hk.Monitor(made, data, path, every=1, what=what, parts=model_parts(model()))
        records = []
        for step in range(3):
            records.append(monitor.step(step))
            made(sequences()[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        lines = hk.Monitor.read(path).records
        said = caught(lambda: hk.Monitor(made, data, f"{folder}/other.jsonl", what=["eigenvalue"]))
        own_section = {"mine": lambda *_: 1 / (size - 1 - rank)}
        failing = hk.Monitor(made, data, f"{folder}/failing.jsonl", what=["norms"], own=own_section)
        failure = caught(lambda: failing.step(0))
        dist.barrier()
    for record in (*records, *lines):
        del record["seconds"]
    return {"records": records, "lines": json.loads(json.dumps(lines)), "refused": said, "failure": failure}


def common(folders: list[str]) -> list[str]:
    """Return the folder of rank 0 on all ranks."""
    values = [folders or None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def operator_cases(rank: int, size: int) -> dict[str, Any]:
    """Multiply with the Hessian and the Gauss-Newton matrix, and find eigenvalues."""
    tokens, labels = share(rank, size)
    pairs = list(zip(tokens.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True))
    found: dict[str, Any] = {}
    for kind in ("hessian", "ggn"):
        operator = hd.hessian_operator(model().eval(), pairs, loss="cross_entropy", kind=kind)
        product = operator @ vectors(operator.shape[0])
        found[kind] = {"product": product.tolist(), "loss": operator.loss, "gradient": operator.gradient.tolist()}
    operator = hd.hessian_operator(model().eval(), pairs, loss="cross_entropy", params=["embedding.P", "final_norm.*"])
    top = hk.spectrum(operator, k=2, method="lanczos", tol=EXACT)
    estimates, solution = hk.scalar_estimates(operator, products=20), operator.solve(operator.gradient, damping=50.0)
    found["lanczos"] = {"values": top.eigenvalues.tolist(), "residuals": top.residuals.tolist()}
    found["trace"], found["solution"] = estimates.trace.value, solution.x.tolist()
    mine = vectors(operator.shape[0])
    found["other vectors"] = caught(lambda: operator @ (mine + (rank == 1)))
    last = rank == size - 1
    calls: list[tuple[Callable[..., Any], str, Any, Any]] = [
        (hk.spectrum, "k", 2, 3),
        (hk.spectrum, "tol", 1e-6, 1e-7),
        (hk.spectrum, "seed", 0, 1),
        (hk.scalar_estimates, "products", 20, 22),
        (partial(hk.curvature.solving.solve, b=operator.gradient), "damping", 50.0, 51.0),
    ]
    found["other options"] = []
    for call, name, here, there in calls:
        said = caught(partial(call, operator, **{name: there if last else here}))
        found["other options"].append([f"{name} is {here!r} on rank 0 and {there!r} on rank {size - 1}", said])
    found["one rank"] = mistakes_of_one_rank(operator, operator.gradient, rank, size)
    P = torch.ones(operator.shape[0] - (rank == size - 1), dtype=torch.float64)
    found["one rank"]["an option"] = caught(lambda: hk.spectrum(operator, k=2, preconditioner=P))
    return found


def mistakes_of_one_rank(operator: hk.HessianOperator, b: Tensor, rank: int, size: int) -> dict[str, str]:
    """Fail on the last rank alone, before a call of all ranks begins to exchange anything, and in the middle of it."""
    last, calls = rank == size - 1, iter(range(4))

    def preconditioner(v: Tensor) -> Tensor:
        if last and next(calls) == 2:
            raise ValueError("no memory here")
        return v

    return {
        "the right-hand side": caught(lambda: operator.solve(b[: len(b) - last], damping=50.0)),
        "a function of the user's": caught(lambda: operator.solve(b, damping=50.0, preconditioner=preconditioner)),
    }


def sharded_cases(rank: int, size: int) -> dict[str, Any]:
    """Multiply with the matrices of models that are spread over the ranks, and find eigenvalues and solutions."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    replicas = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))

    def spread(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        made = sharded_models.MODELS[name]().to(dtype)
        for layer in sharded_models.layers(made):
            fully_shard(layer, **options)
        return fully_shard(made, **options)

    def whole(vector: dict[str, Any]) -> dict[str, Any]:
        return {name: x.full_tensor().tolist() for name, x in vector.items()}

    found: dict[str, Any] = {}
    for name, kind in sharded_models.KINDS:
        made = spread(name, **({"mesh": replicas} if kind == "ggn" else {}))
        operator = hd.hessian_operator(made, sharded_models.share(rank, size), loss="cross_entropy", kind=kind)
        parameters = {n: p for n, p in made.named_parameters() if p.requires_grad}
        drawn = sharded_models.vector({n: tuple(p.shape) for n, p in parameters.items()})
        v = {n: distribute_tensor(drawn[n], p.device_mesh, p.placements) for n, p in parameters.items()}
        of_case = found[f"{name}, {kind}"] = {"product": whole(operator @ v), "loss": operator.loss}
        if name == "adapters" or kind == "ggn":
            top = hk.spectrum(operator, k=2, tol=EXACT, directions=2, steps=6)
            solution = operator.solve(v, damping=1.0 if kind == "ggn" else 50.0, tol=1e-13)
            sketch, means = (hk.scalar_estimates(operator, products=count) for count in sharded_models.PRODUCTS)
            of_case |= {"eigenvalues": top.eigenvalues.tolist(), "solution": whole(solution.x)}
            of_case |= {"trace": top.trace.value, "rank": top.effective_rank.value}
            of_case["estimates"] = [sharded_models.numbers(one) for one in (sketch, means)]
    made = spread("tied", torch.bfloat16)
    half = hd.hessian_operator(made, sharded_models.share(rank, size), loss="cross_entropy")
    narrow = dict(made.named_parameters())
    drawn = sharded_models.vector({n: tuple(p.shape) for n, p in narrow.items()})
    direction = {n: distribute_tensor(drawn[n].float(), p.device_mesh, p.placements) for n, p in narrow.items()}
    found["half precision"] = whole(half @ direction)
    found["one rank"] = mistakes_of_one_rank(operator, operator.gradient, rank, size)
    found["one rank"]["a vector"] = caught(lambda: operator @ operator.gradient[rank // (size - 1) :])
    refused = (lambda: 2 * operator, operator.to_matrix, lambda: operator.approximation("kfac"))
    found["refused"] = [caught(call) for call in refused]  # type: ignore[arg-type]
    found["refused"] += [
        caught(lambda: hk.spectrum(operator, method="full")),
        caught(lambda: hk.spectrum(operator, by="parameter")),
    ]
    with torch.no_grad():
        next(iter(parameters.values())).mul_(2)
    found["changed"] = caught(lambda: operator @ v)
    return found


def memory_cases(rank: int, size: int) -> dict[str, float]:
    """Count bytes alive beside the pieces of parameters and vectors, in layers: in the last layer's calls, and in a product."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    made = hk.Transformer(VOCABULARY, 128, 512, 5, 2, placement="pre", max_len=LENGTH, causal=True).double().eval()
    layer, whole = (8.0 * sum(p.numel() for p in part.parameters()) for part in (made.blocks[0], made))
    for block in made.blocks:
        fully_shard(block)
    fully_shard(made)
    pieces = [p.to_local() for p in made.parameters()]  # type: ignore[operator]
    tokens = torch.tensor([[1, 2]])
    with BytesAlive(*pieces) as alive:
        handle = made.blocks[-1].register_forward_pre_hook(  # of torch's own calls torch decides
            lambda block, _: None if isinstance(block, FSDPModule) else alive.mark()
        )
        operator = hd.hessian_operator(made, [(tokens, tokens)], loss="cross_entropy")
        handle.remove()
    v, marked = operator.gradient, alive.marked
    with PeakBytes(*pieces, v) as alive:
        _ = operator @ v
    hashes = 8 * HASH_WORDS  # which change with no model
    return {"set-up": (marked - whole / size) / layer, "product": (alive.marked - hashes - 3 * whole / size) / layer}


def error_cases(rank: int, size: int) -> dict[str, Any]:
    """Make mistakes on one rank; return how the line has to begin, and the line."""
    tokens, labels = share(rank, size)
    data = (tokens, labels) if len(tokens) else []
    pairs = list(zip(tokens.split(1), labels.split(1), strict=True)) if len(tokens) else []
    last = rank == size - 1
    wrong = (tokens, labels + 100) if last else data
    plain, moved, other_eps, constant, spread = (model() for _ in range(5))
    with torch.no_grad():
        moved.blocks[1].norm_1.weight[3] += 1e-15 * last
    if last:
        for one in (other_eps, spread):
            one.blocks[0].norm_1.eps = 1e-3
        constant.blocks[0].feedforward.register_forward_hook(lambda module, inputs, out: out + torch.tensor(1e-9))

    def unknown(out: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), t.flatten())

    def sharpness(made: nn.Module, its: Any = data, **options: Any) -> str:
        return caught(lambda: over_ranks(made, its, **{**OPTIONS, "parts": model_parts(plain), **options}))

    def operator(made: nn.Module, its: Any = pairs, **options: Any) -> str:
        return caught(lambda: hd.hessian_operator(made.eval(), its, **{"loss": "cross_entropy", **options}))

    def apart(name: str, first: Any, second: Any) -> str:
        return f"{name} is {first!r} on rank 0 and {second!r} on rank {size - 1}; expected the same on every rank"

    differs = "the same data take operation"
    labels_lie = f"on rank {size - 1} of {size}: labels lie in [0, 112], expected 0 to 12"
    of_sharpness = [
        (differs, sharpness(other_eps)),
        (differs, sharpness(torch.compile(other_eps))),
        (differs, sharpness(sharded(spread))),
        (labels_lie, sharpness(plain, wrong)),
        (labels_lie, sharpness(sharded(model()), wrong)),
        *(
            (apart(name, *values), sharpness(plain, **{name: values[last]}))
            for name, values in {
                "draws": (2, 3),
                "seed": (5, 6),
                "per": ("token", "sequence"),
                "kind": ("fisher-mc", "fisher-empirical"),
                "loss": ("cross_entropy", "mse"),
                "histograms": (True, False),
                "shift": (None, False),
                "confidence": (0.95, 0.9),
            }.items()
        ),
        (apart("numbers=", "not given", "given"), sharpness(plain, numbers=range(9, 9 + len(tokens)) if last else None)),
        ("the parameter 'blocks.1.norm_1.weight' is '(8,), float64, digest ", sharpness(moved)),
        ("two ranks hold a sequence of number 0", sharpness(plain, numbers=range(len(tokens)))),
        ("no rank holds a label that counts", sharpness(plain, [])),
    ]
    of_operator = [
        (differs, operator(constant)),
        *(
            (apart(name, *values), operator(plain, **{name: values[last]}))
            for name, values in {
                "kind": ("hessian", "ggn"),
                "loss": ("cross_entropy", "mse"),
                "block_size": (1, 2),
                "reduction": ("mean", "sum"),
            }.items()
        ),
        (apart("weighted", False, True), operator(plain, weights=[1.0] * len(pairs) if last else None)),
        ("the weights of the ranks' batches are unknown with unknown", operator(plain, data, loss=unknown)),
        (labels_lie, operator(plain, wrong)),
    ]
    whole = "the module is sharded (FSDPModule), and only part of its values is here; use hessiankit.training.distributed"
    of_one_process: dict[str, Any] = {name: [] for name in ("hessian", "check")}
    for is_called in (False, True):
        spread = sharded(model()).eval()
        if is_called:
            spread(sequences()[0])  # which leaves gathered parameters behind
        for name, lines in of_one_process.items():
            lines.append((whole, caught(partial(getattr(hk, name), spread, *sequences(), loss="cross_entropy"))))
    return {"sharpness": of_sharpness, "hessian_operator": of_operator, **of_one_process}


def fail(how: str) -> dict[str, Any]:
    """Lose one rank in the middle of a measurement.

    ``"first"`` is killed, ``"stuck"``, the last one, stands still; ``"tokens"``: the last one's forward pass fails; ``"product"``
    and ``"set-up"``: the last one is killed before a product of a sharded model, and in a layer while one is made.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    victim = 0 if how == "first" else size - 1

    def stop(_what: str, done: int, _total: int) -> None:
        if rank == victim and done == 2 and how != "tokens":
            time.sleep(0.5)  # what was sent before has arrived
            os.kill(os.getpid(), signal.SIGSTOP if how == "stuck" else signal.SIGKILL)

    made = model()
    options = {**OPTIONS, "parts": model_parts(made), "progress": stop}
    dist.barrier()
    if how == "stuck":
        options["group"] = dist.new_group(timeout=timedelta(seconds=STUCK))
    tokens, labels = share(rank, size)
    data = (tokens + 100 * (how == "tokens" and rank == victim), labels)
    began = time.monotonic()
    if how == "set-up":
        made.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if rank == victim else None)
        said = caught(lambda: hd.hessian_operator(sharded(made).eval(), [share(rank, size)], loss="cross_entropy"))
        return {"said": said, "seconds": time.monotonic() - began}
    if how == "product":
        operator = hd.hessian_operator(sharded(made).eval(), [share(rank, size)], loss="cross_entropy")
        began = time.monotonic()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        said = caught(lambda: operator @ operator.gradient)
        return {"said": said, "seconds": time.monotonic() - began}
    said = caught(lambda: over_ranks(made if how == "stuck" else sharded(made), data, **options))
    return {"said": said, "seconds": time.monotonic() - began}


def all_cases(rank: int, size: int) -> dict[str, Any]:
    """Find everything that ranks without a failure find."""
    return {
        "sharpness": sharpness_cases(rank, size),
        "operator": operator_cases(rank, size),
        "sharded": sharded_cases(rank, size),
        "memory": memory_cases(rank, size),
        "errors": error_cases(rank, size),
    }


def start(folder: Path, how: str, size: int) -> list[int]:
    """Fork the ranks of one way and return their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        if process := os.fork():
            started.append(process)
            continue
        code = 1
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            found = all_cases(rank, size) if how == "all" else fail(how)
            (folder / f"{how}-{rank}.json").write_text(json.dumps(found))
            if how == "all":
                dist.destroy_process_group()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return started


def main() -> None:
    """Run the ways side by side; whoever is left of a way ends it."""
    import torch._dynamo  # what fully_shard imports, once instead of by every rank
    import torch.distributed.fsdp  # noqa: F401

    folder, size, *ways = sys.argv[1:]
    running = {how: start(Path(folder), how, int(size) if how == "all" else 2) for how in ways}
    for how, processes in running.items():
        left = processes if how == "all" else processes[1:] if how == "first" else processes[:-1]
        codes = [os.waitpid(process, 0)[1] for process in left]
        for process in set(processes) - set(left):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        assert not any(codes), (how, codes)


if __name__ == "__main__":
    main()
