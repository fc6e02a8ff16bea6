"""Published architectures against automatic differentiation: ``python -m benchmarks.models --markdown docs/models.md``.

For every architecture of :mod:`benchmarks.architectures`, with both implementations of attention, on a padded batch with the
label -100 where there is padding: products of the Hessian in generic directions, in float64 beside reverse over reverse and
central differences of the gradient, and in bfloat16 beside the float64 product at the same parameters.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from benchmarks.architectures import ATTENTIONS, InDouble, Instance, build, names, quiet
from benchmarks.tables import markdown
from benchmarks.vision import vision, vision_names
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.jsonl import append_records, read_records, usable

EXACT, DIFFERENCES, CASTING, HALF = 1e-10, 1e-5, 1e-3, 0.3
"""Tolerances, relative to the largest entry of a parameter's part of the product: to reverse over reverse; to central
differences, whose own error this is; with casts to float32; in bfloat16, or twice what reverse over reverse reaches there if that
is more: rounding the model's values may alone move a derivative further."""
FLOORS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
"""Of the whole product's largest entry: a parameter's part below it, such as that of a key's bias, is compared with this."""


@dataclass(frozen=True)
class Row:
    """Result of one architecture.

    Attributes:
        name: "causal/llama" and the like.
        attention: "eager" or "sdpa".
        parameters: How many there are.
        float64: Largest error beside reverse over reverse.
        differences: Largest error beside central differences of the gradient.
        casting: Largest error, in float64, of the model with its own casts to float32, beside reverse over reverse with them.
        bfloat16: Largest error of the product in bfloat16 beside that in float64.
        autograd: The same of reverse over reverse in bfloat16.
        fallbacks: Operations without a closed form.
        reason: Why there is no number, where there is none.
        seconds: Total time.
    """

    name: str
    attention: str
    parameters: int = 0
    float64: float = math.nan
    differences: float = math.nan
    casting: float = math.nan
    bfloat16: float = math.nan
    autograd: float = math.nan
    fallbacks: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every computed error is within its tolerance."""
        half = HALF if math.isnan(self.autograd) else max(HALF, 2 * self.autograd)
        pairs = ((self.float64, EXACT), (self.differences, DIFFERENCES), (self.casting, CASTING), (self.bfloat16, half))
        return all(error <= allowed or math.isnan(error) for error, allowed in pairs)


class _Stopped(Exception):
    """Carries the reason why there is no number."""


@contextmanager
def _own(what: str) -> Iterator[None]:
    """Turn errors of the model or of torch into ``_Stopped``, unlike those of hessiankit."""
    try:
        yield
    except Exception as error:
        raise _Stopped(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def measure(name: str, attention: str, *, full: bool = True) -> Row:
    """Compare one architecture; where that stops, the row has the reason.

    Args:
        name: Its name.
        attention: "eager" or "sdpa".
        full: Everything; else beside reverse over reverse in float64 alone.
    """
    start = time.perf_counter()
    with quiet():
        instance = vision(name, attention) if name.startswith("timm/") else build(name, attention)
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in leaves(instance.model))}
        try:
            for more in _compared(instance, full=full):
                found |= more
        except (HessiankitError, _Stopped) as error:
            found["reason"] = str(error)
    return Row(name, attention, **found, seconds=time.perf_counter() - start)


def _compared(instance: Instance, *, full: bool) -> Iterator[dict[str, Any]]:
    plain, module, batch = instance.model, InDouble(instance.model), instance.batch
    vector = direction(module)
    with _own("the model in float64"):
        expected = twice(module, batch, vector)
    operator = hk.hessian_operator(module, batch, loss=None)
    product = operator @ vector
    yield {"float64": error(product, expected, module), "fallbacks": operator.fallbacks}
    if not full:
        return
    slope = differences(leaves(module), lambda: gradient(module, batch), vector)
    yield {"differences": error(slope, expected, module)}
    with _own("the model in float64 with its own casts"):
        expected = twice(plain, batch, vector)
    cast = hk.hessian_operator(plain, batch, loss=None) @ vector
    yield {"casting": error(cast, expected, plain, torch.float32)}
    low = plain.to(torch.bfloat16)  # in place: a model that keeps states from call to call has no copy
    halves = {k: x.to(torch.bfloat16) if x.is_floating_point() else x for k, x in batch.items()}
    with _own("the model in bfloat16"):
        own = twice(low, halves, vector.bfloat16()).double()
    yield {"autograd": error(own, product, module, torch.bfloat16)}
    half = hk.hessian_operator(low, halves, loss=None) @ vector.float()
    yield {"bfloat16": error(half.double(), product, module, torch.bfloat16)}


def leaves(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, in the order of the operator's entries."""
    return [p for p in module.parameters() if p.requires_grad]


def direction(module: nn.Module) -> Tensor:
    """Return a generic direction that bfloat16 holds exactly, and that leaves the rows of ``padding_idx`` where they are.

    torch gives these rows no gradient, although a model that reads padding (a convolution) depends on them: along them its
    gradient has no symmetric derivative.
    """
    generator = torch.Generator().manual_seed(5)
    parts = {id(p): torch.randn(p.shape, generator=generator).bfloat16().double() for p in leaves(module)}
    for m in module.modules():
        if isinstance(m, nn.Embedding) and m.padding_idx is not None:
            parts[id(m.weight)][m.padding_idx] = 0.0
    return torch.cat([parts[id(p)].reshape(-1) for p in leaves(module)])


def gradient(module: nn.Module, batch: dict[str, Tensor], *, graph: bool = False) -> Tensor:
    """Return the gradient of the model's own loss, as one vector."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
        loss = module(**batch).loss
    grads = torch.autograd.grad(loss, leaves(module), create_graph=graph, materialize_grads=True, allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads])


def twice(module: nn.Module, batch: dict[str, Tensor], vector: Tensor) -> Tensor:
    """Return the product by reverse over reverse."""
    slope = gradient(module, batch, graph=True) @ vector
    grads = torch.autograd.grad(slope, leaves(module), materialize_grads=True, allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads])


def differences(parameters: Sequence[Tensor], gradient: Callable[[], Tensor], vector: Tensor, step: float = 1e-6) -> Tensor:
    """Return the product by central differences of the gradient at the parameters."""
    before = [p.detach().clone() for p in parameters]
    pieces = vector.split([p.numel() for p in before])

    @torch.no_grad()
    def move(t: float) -> None:
        for p, x, v in zip(parameters, before, pieces, strict=True):
            p.copy_(x + t * v.reshape(x.shape))

    try:
        move(step)
        after = gradient()
        move(-step)
        return (after - gradient()) / (2 * step)
    finally:
        move(0.0)


def error(found: Tensor, expected: Tensor, module: nn.Module, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest difference over all parameters, relative to the largest entry of the parameter's part."""
    sizes, whole = [p.numel() for p in leaves(module)], float(expected.abs().max())
    parts = zip(found.split(sizes), expected.split(sizes), strict=True)
    worst = 0.0
    for mine, reference in parts:
        if reference.numel() and whole:
            scale = max(float(reference.abs().max()), FLOORS[dtype] * whole)
            worst = max(worst, float((mine - reference).abs().max()) / scale)
    return worst if bool(torch.isfinite(found).all()) else math.inf


def page(rows: Sequence[Row]) -> str:
    """Return the page: what was compared, and what was refused."""
    good = [row for row in rows if not math.isnan(row.float64)]
    refused = [row for row in rows if row.reason]
    kinds = len({row.name for row in good})
    half = sorted(row.bfloat16 for row in good if not math.isnan(row.bfloat16))
    summary = f"The table has {kinds} architectures, {len(good)} counting their implementations of attention. In float64 they "
    summary += f"differ from reverse over reverse by at most {max((row.float64 for row in good), default=math.nan):.0e}."
    summary += (
        f" In bfloat16 the difference is {half[len(half) // 2]:.0e} in the median and at most {half[-1]:.0e}." if half else ""
    )
    summary += "\n"
    headers = (
        "architecture",
        "attention",
        "P",
        "float64",
        "differences",
        "own casts",
        "bfloat16",
        "autograd, bfloat16",
        "fallbacks",
    )
    text = f"{HEAD}\n{summary}\n{markdown(headers, [_cells(row) for row in good], text=2)}\n"
    if refused:
        reasons = [(row.name, row.attention, row.reason) for row in refused]
        text += f"\n## Refused\n\n{markdown(('architecture', 'attention', 'reason'), reasons, text=3)}\n"
    return text


def _cells(row: Row) -> tuple[str, ...]:
    errors = (row.float64, row.differences, row.casting, row.bfloat16, row.autograd)
    numbers = ("" if math.isnan(x) else f"{x:.0e}" for x in errors)
    return (row.name, row.attention, str(row.parameters), *numbers, ", ".join(row.fallbacks))


def every_name() -> list[str]:
    """Return the names of all architectures, of transformers and of timm."""
    return [*names(), *vision_names()]


def attentions(name: str) -> tuple[str, ...]:
    """Return the implementations of attention that a model has."""
    import transformers

    fused = name.startswith("timm/") or getattr(transformers, names()[name])._supports_sdpa
    return ATTENTIONS if fused else ATTENTIONS[:1]


HEAD = f"""# Architectures

`python -m benchmarks.models` builds a tiny version of every model from its configuration, with generic parameters and the
model's own loss. The data are a padded batch of tokens, with the label -100 for padding, or two images.

- **float64**: the largest difference of `hessian_operator`'s product in a generic direction from reverse over reverse through the
  model itself, parameter by parameter, relative to the largest entry of the parameter's part; {EXACT:.0e} is allowed. A model's
  own casts to float32 are replaced by float64 on both sides, so that all digits can be seen.
- **differences**: the same difference from central differences of the model's gradient, mostly the error of these.
- **own casts**: the difference in float64 where both sides make the model's casts to float32; {CASTING:.0e} is allowed.
- **bfloat16**: the difference between the product of the model in bfloat16 and that of the model in float64, at the same
  parameters and inputs. It is relative to a part's largest entry, or to bfloat16's rounding of the largest entry of all parts
  if that is larger.
- **autograd, bfloat16**: the same difference for reverse over reverse. It shows what rounding does to any derivative.
- **fallbacks**: operations without a closed form, differentiated by torch one by one.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Compare tiny instances of many architectures with automatic differentiation. What is finished is kept in "
        "--out. Exit code 0: all as exact as promised, or refused with a reason; 1: not; 2: an option cannot be used.",
    )
    top.add_argument(
        "--only", nargs="+", metavar="PART", help="architectures whose names contain one of these, such as causal/llama"
    )
    top.add_argument("--attention", choices=ATTENTIONS, help="one implementation of attention (default: both)")
    top.add_argument("--out", type=Path, default=Path("results/models.jsonl"), help="finished rows (default: %(default)s)")
    top.add_argument("--markdown", type=Path, metavar="PAGE", help="write what is in --out as a page")
    top.add_argument("--list", action="store_true", help="print the names, and stop")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parser().parse_args(arguments)
    wanted = [name for name in every_name() if not options.only or any(part in name for part in options.only)]
    if options.list:
        print("\n".join(wanted))
        return 0
    if not wanted:
        print(f"benchmarks.models: --only {' '.join(options.only)} names nothing; see --list", file=sys.stderr)
        return 2
    for package, needed in (("transformers", True), ("timm", any(name.startswith("timm/") for name in wanted))):
        try:
            if needed:
                import_module(package)
        except Exception as error:  # a torchvision for another torch raises what it likes
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(
                f"benchmarks.models: {package} cannot be imported ({why}); docs/howto/install.md says what it needs, and "
                "--only leaves its models out",
                file=sys.stderr,
            )
            return 2
    cases = [(name, a) for name in wanted for a in attentions(name) if options.attention in (None, a)]
    try:
        rows = finish(cases, options.out)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if options.markdown is not None:
        options.markdown.write_text(page(rows))
    return 0 if all(row.passed for row in rows) else 1


def finish(cases: Sequence[tuple[str, str]], path: Path) -> list[Row]:
    """Return a row for each name and implementation of attention; those that the file lacks are measured and appended to it."""
    with usable("benchmarks.models", path):
        rows = list(read_records(path, lambda record: Row(**{**record, "fallbacks": tuple(record["fallbacks"])})))
        append_records(path)  # raises where the file cannot be written
    known = {(row.name, row.attention): row for row in rows}
    for case in cases:
        if case not in known:
            known[case] = measure(*case, full=case[1] == ATTENTIONS[0])
            with usable("benchmarks.models", path):
                append_records(path, asdict(known[case]))
            print(line(known[case]), flush=True)
    return [known[case] for case in cases]


def line(row: Row) -> str:
    """Return a row as one line."""
    verdict = "" if row.passed else ", NOT AS EXACT AS PROMISED"
    numbers = f"float64 {row.float64:.0e}, bfloat16 {row.bfloat16:.0e}, {row.seconds:.1f} s{verdict}"
    return f"{row.name} ({row.attention}): {numbers}{'; ' if row.reason else ''}{row.reason}"


if __name__ == "__main__":
    sys.exit(main())
