"""Models of up to billions of parameters on one device, beside other routes: ``python -m benchmarks.large --device cuda``.

Three tables in at most ten minutes: products with the Hessian of Llamas of drawn parameters in bfloat16, with float32 vectors;
double backward of attention; dense Hessians. A row begins while time is left. ``--small`` takes small sizes, for any device.
``--eigenvalue`` and ``--errors`` add the largest eigenvalue by ten products, and errors against float64.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from benchmarks.architectures import quiet
from benchmarks.models import differences
from benchmarks.problems import make
from benchmarks.real_sizes import Logits
from benchmarks.residence import Memory
from benchmarks.suites.attention import double_backward, problem_of
from hessiankit.verify.reference_automatic import GradientGraph
from hessiankit.verify.reference_base import typed_line

SIZES: dict[str, dict[str, int]] = {
    "0.2M": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17, "num_attention_heads": 16},
    "3B": {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 36, "num_attention_heads": 20},
}
"""Configurations of Llama; the vocabulary is 32,000 unless stated, head and embedding apart."""
TOKENS, SECONDS, PRODUCTS = 128, 600.0, 10
STEPS = tuple(10 ** (-k / 2) for k in range(2, 9))
"""Steps of differences, relative to the norm of the parameters."""

Row = tuple[str, ...]


def llama(size: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a Llama with drawn parameters, and one sequence with the tokens that follow."""
    import transformers

    torch.manual_seed(0)
    with quiet():
        config = transformers.LlamaConfig(**SIZES[size], use_cache=False)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device if torch.device(device).type == "cuda" else "cpu"):
                model = Logits(transformers.LlamaForCausalLM(config)).eval()
        finally:
            torch.set_default_dtype(default)
    tokens = torch.randint(config.vocab_size, (1, TOKENS + 1)).to(device)
    return model.to(device), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy in single precision at least."""
    logits = model(x)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return torch.nn.functional.cross_entropy(wide.flatten(0, -2), y.flatten())


def flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient by torch as one vector."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))])


def drawn(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a vector of the size of the parameters, on their device."""
    p = next(model.parameters())
    return torch.randn(sum(p.numel() for p in model.parameters()), dtype=dtype).to(p.device)


def double(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return products by double backward with a kept graph."""
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        graph = GradientGraph(loss_of(model, x, y), parameters)
    sizes = [p.numel() for p in parameters]

    def product(v: Tensor) -> Tensor:
        pieces = [part.reshape(p.shape).to(p.dtype) for part, p in zip(v.split(sizes), parameters, strict=True)]
        return torch.cat([part.reshape(-1) for part in graph.product(pieces)])

    return product


def measured(device: str, work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Do some work; return its result, its seconds, and the peak of memory meanwhile beyond that before, in GiB."""
    memory = Memory(device)
    start = time.perf_counter()

    def finished() -> Any:
        result = work()
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize()
        return result

    result, peak = memory.peak(finished)
    return result, time.perf_counter() - start, peak / 2**30


def row_of(name: str, prepare: Callable[[], Callable[[], Any]], device: str) -> tuple[Row, Any]:
    """Return a row of set-up, the faster of two calls and the peaks of both; and the result, None where it failed."""
    try:
        call, setup, setup_peak = measured(device, prepare)
        first, peak = measured(device, call)[1:]
        result, second, _ = measured(device, call)
    except Exception as error:  # whatever another route raises where it is out of memory, or has no derivative
        lacks = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
        return (name, "out of memory" if lacks else typed_line(error), "", "", ""), None
    return (name, f"{setup:.3g}", f"{min(first, second):.3g}", f"{setup_peak:.2f}", f"{peak:.2f}"), result


def products(size: str, device: str, *, peers: bool) -> Iterator[Row]:
    """Yield rows of a gradient, our operator and double backward for one Llama."""
    model, x, y = llama(size, torch.bfloat16, device)
    v, count = drawn(model, torch.float32), sum(p.numel() for p in model.parameters())
    name = f"Llama, {count / 1e6:,.1f}M" if count < 1e9 else f"Llama, {count / 1e9:.2f}B"
    yield row_of(f"{name}: gradient", lambda: partial(flat_gradient, model, x, y), device)[0]

    def ours(recompute: Any = None) -> Callable[[], Tensor]:
        operator = hk.hessian_operator(model, x, y, loss="cross_entropy", recompute=recompute)
        return lambda: operator @ v

    yield row_of(f"{name}: `hessian_operator`", ours, device)[0]
    gc.collect()
    yield row_of(f'{name}: `hessian_operator`, `recompute="layers"`', partial(ours, "layers"), device)[0]
    gc.collect()
    if peers:
        yield row_of(f"{name}: double backward, kept graph", lambda: partial(double(model, x, y), v), device)[0]


def attention(length: int, device: str) -> Iterator[Row]:
    """Yield rows of a double backward of causal attention: ours and torch's math path."""
    shapes, functions, _ = problem_of(f"attention-causal-L{length}", device)
    x, v = ([torch.randn(s).to(device) for s in shapes] for _ in range(2))
    leaves = [part.requires_grad_() for part in x]
    for kind, words in (("ours", "`scaled_dot_product_attention`"), ("twice", "torch's math path")):
        work = partial(double_backward, functions[kind], leaves, v)
        yield row_of(f"causal attention, {length:,} tokens: {words}", lambda work=work: work, device)[0]  # type: ignore[misc]


def dense(problem: str, device: str) -> Iterator[Row]:
    """Yield rows of a dense Hessian in float64: ours, and batched double backward."""
    case = make(problem, 1, "float64", device)
    name = f"dense, P = {case.size:,}"
    yield row_of(
        f"{name}: `hessian`", lambda: lambda: hk.hessian(case.module, case.inputs, case.target, loss=case.loss).matrix, device
    )[0]

    def columns() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            parameters = list(case.module.parameters())
            graph = GradientGraph(case.loss_of(case.module(case.inputs)), parameters)
            unit = torch.eye(case.size, dtype=torch.float64, device=device).split([p.numel() for p in parameters], 1)
            rows = graph.product([u.reshape(-1, *p.shape) for u, p in zip(unit, parameters, strict=True)], batched=True)
            return torch.cat([part.flatten(1) for part in rows], 1)

    yield row_of(f"{name}: `vmap(vjp(grad))`", lambda: columns, device)[0]


def eigenvalue(size: str, device: str) -> Row:
    """Return a row of the largest eigenvalue by ten steps of Lanczos, of which three vectors are kept."""
    model, x, y = llama(size, torch.bfloat16, device)

    def prepare() -> Callable[[], float]:
        operator = hk.hessian_operator(model, x, y, loss="cross_entropy")

        def lanczos() -> float:
            v, before, beta = drawn(model, torch.float32), None, 0.0
            v /= v.norm()
            T = torch.zeros(PRODUCTS, PRODUCTS, dtype=torch.float64)
            for k in range(PRODUCTS):
                w = operator @ v
                T[k, k] = float(v @ w)
                w.sub_(v, alpha=float(T[k, k]))
                if before is not None:
                    w.sub_(before, alpha=beta)
                beta = float(w.norm())
                if k + 1 < PRODUCTS:
                    T[k, k + 1] = T[k + 1, k] = beta
                before, v = v, w.div_(beta)
            return float(torch.linalg.eigvalsh(T)[-1])

        return lanczos

    memory_row = measured(device, prepare)
    found, seconds, peak = measured(device, memory_row[0])
    return (
        f"Llama {size}: eigenvalue {found:.4g}",
        f"{memory_row[1]:.3g}",
        f"{seconds:.3g}",
        f"{memory_row[2]:.2f}",
        f"{peak:.2f}",
    )


def errors(size: str, device: str) -> Iterator[Row]:
    """Yield relative errors of one product in bfloat16, against double backward in float64 at the same parameters."""
    model, x, y = llama(size, torch.bfloat16, device)
    v = drawn(model, torch.float32)
    found = {
        "`hessian_operator`": hk.hessian_operator(model, x, y, loss="cross_entropy") @ v,
        "double backward": double(model, x, y)(v),
    }
    scale = float(torch.stack([p.detach().float().norm() for p in model.parameters()]).norm() / v.norm())
    by_step = {h: differences(list(model.parameters()), lambda: flat_gradient(model, x, y).float(), v, h * scale) for h in STEPS}
    exact = double(model.double(), x, y)(v.double())

    def error(product: Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    best = min(STEPS, key=lambda h: error(by_step[h]))
    for name, product in {**found, f"differences, step {best:g}": by_step[best]}.items():
        yield (name, f"{error(product):.1e}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--device", default="cuda", help="device of torch (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small sizes, in seconds")
    parser.add_argument("--models", nargs="*", choices=list(SIZES), help="Llamas alone, and these")
    parser.add_argument("--no-peers", action="store_true", help="leave double backward of the Llamas out")
    parser.add_argument("--eigenvalue", choices=list(SIZES), help="add the largest eigenvalue of a Llama")
    parser.add_argument("--errors", action="store_true", help="add errors of products in bfloat16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time within which rows begin (default: %(default)g)")
    options = parser.parse_args(arguments)
    end, device = time.perf_counter() + options.seconds, options.device
    sizes = options.models if options.models is not None else ["0.2M"] if options.small else ["0.5B", "1B", "3B"]
    groups: list[Callable[[], Iterator[Row]]] = [partial(products, s, device, peers=not options.no_peers) for s in sizes]
    if options.models is None:
        lengths = (64,) if options.small else (4096, 16384)
        groups += [partial(attention, length, device) for length in lengths]
        groups += [partial(dense, problem, device) for problem in (("tiny",) if options.small else ("small", "medium"))]
    if options.eigenvalue:
        groups.append(lambda: iter([eigenvalue(options.eigenvalue, device)]))
    print("| what | set-up (s) | call (s) | peak of the set-up, beyond the model (GiB) | of a call |\n|---|--:|--:|--:|--:|")
    for group in groups:
        if time.perf_counter() > end:
            print(f"| no time left for the rest, of {options.seconds:g} s | | | | |")
            break
        for row in group():
            print(f"| {' | '.join(row)} |", flush=True)
        gc.collect()
    if options.errors:
        print("\n| bfloat16, Llama of 0.2M | relative error |\n|---|--:|")
        for row in errors("0.2M", device):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
