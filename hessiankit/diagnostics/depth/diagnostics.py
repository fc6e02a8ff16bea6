"""``depth_diagnostics``: what depth does to a model, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from hessiankit.blocks import TransformerBlock
from hessiankit.diagnostics.depth.blocks import WHO, Blocks, find_blocks, recording_middles
from hessiankit.diagnostics.depth.curvature import KINDS, METHODS, layer_curvature
from hessiankit.diagnostics.depth.depth_report import DepthReport
from hessiankit.diagnostics.depth.jacobians import jacobians
from hessiankit.diagnostics.depth.laws import growth_laws, theory_of
from hessiankit.diagnostics.depth.pruning import pruning_drop
from hessiankit.diagnostics.depth.recording import (
    Data,
    check_finite,
    counted_tokens,
    expected_memory,
    last_tokens,
    quiet,
    read_data,
    recording,
)
from hessiankit.diagnostics.depth.stream import AngleSums, AngularDistances, StreamStatistics, StreamSums, gradient_norms
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell
from hessiankit.support.torch_state import one_at_a_time

QUANTITIES = ("variance", "angles", "drop", "gradient", "jacobian", "hessian", "ggn")
CHEAP = QUANTITIES[:4]
UNLABELLED = ("variance", "angles", "jacobian")


@checked("depth_diagnostics")
@one_at_a_time
def depth_diagnostics(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    blocks: str | Iterable[str | nn.Module] | None = None,
    what: str | Iterable[str] = CHEAP,
    tokens: str = "all",
    loss: str = "cross_entropy",
    renumber: bool = False,
    curvature: str = "auto",
    draws: int = 8,
    exact_below: int = 256,
    tol: float = 1e-3,
    products: int = 60,
    seed: int = 0,
    micro_batch: int | None = None,
    progress: Tell | None = None,
) -> DepthReport:
    """Return what depth does to a model: one row a block, as The Curse of Depth (Sun et al. 2025) asks of them, corrected.

    ``"variance"`` (with rho, update ratio and growth laws), ``"angles"``, ``"drop"`` (one forward pass a block) and
    ``"gradient"`` cost about L + 4 forward passes and a backward pass; ``"jacobian"``, ``"hessian"`` and ``"ggn"`` cost up to
    ``products + draws`` passes of second derivatives a block. docs/depth.md has every formula and what it does not say.

    The model runs in evaluation mode. Its parameters, buffers, gradients, modes and hooks, and the random states, are afterwards
    what they were, also after an error or Ctrl-C.

    Args:
        model: hessiankit's ``Transformer`` or ``VisionTransformer``, a Hugging Face decoder or encoder, or any module whose
            blocks, in one list, map a hidden state (..., tokens, d) to one: a tensor, or the first entry of a tuple.
        data: A tensor of inputs with ``target``; a pair (inputs, target); a mapping of keyword arguments with ``labels`` (a
            Hugging Face batch: logits[:, :-1] against labels[:, 1:]); or an iterable of pairs or mappings. Labels may be left
            out where no loss is asked for. -100 does not count. Tokens where ``attention_mask`` is 0 are left out.
        target: Labels, one for each row of logits, or for squared error a tensor of the output's shape.
        blocks: The name of the list of blocks, or the blocks or their names; found by what flows between modules by default.
        what: Some of ``"variance", "angles", "drop", "gradient", "jacobian", "hessian", "ggn"``, or ``"all"``.
        tokens: Whether the stream's numbers are means over ``"all"`` counted tokens or the ``"last"`` one of each sequence.
            Angles are given for both.
        loss: ``"cross_entropy"`` or ``"mse"``, a mean over all that counts.
        renumber: With a block removed, whether later blocks' 1 / sqrt(l) moves up; hessiankit's blocks only.
        curvature: How Hessians are multiplied: ``"exact"``, ``"autograd"`` or ``"auto"``; the report says which was used.
        draws: Random probes of Frobenius norms and traces.
        exact_below: States, or parameters of a block, up to which all unit vectors are taken in place of probes.
        tol: Relative tolerance of Lanczos's residuals.
        products: Products of one Lanczos run at most.
        seed: Of probes and first vectors.
        micro_batch: Sequences treated at once; each batch as it is by default.
        progress: Called with (what is being done and the memory that it takes, pieces done, pieces in all).

    Raises:
        InputError: If an argument cannot be used, the blocks are not found, or a hidden state is not finite.
        OutOfMemoryError: If the states and graphs do not fit; said before they are made.

    Blocks that add a half of the stream: variance 9/4 per block, cosine 1, and the Jacobian is 3/2 of the identity.

    >>> half = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    >>> half.weight.data = 0.5 * torch.eye(2, dtype=torch.float64)
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f = half
    ...     def forward(self, x):
    ...         return x + self.f(x)
    >>> model = nn.Sequential(Block(), Block(), Block())
    >>> x = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    >>> found = depth_diagnostics(model, x, what=("variance", "jacobian"))
    >>> found.stream.variance, found.stream.update_ratio["block"]
    ((1.0, 2.25, 5.0625, 11.390625), (0.5, 0.5, 0.5))
    >>> found.laws.best, [round(s.value, 12) for s in found.jacobians.spectral], found.jacobians.gain.value
    ('exponential', [0.5, 0.5, 0.5], 3.375)
    """
    asked = _asked(what)
    _check(tokens, curvature, draws, exact_below, tol, products)
    start = time.perf_counter()
    with quiet(model):
        read = read_data(model, data, target, loss, micro_batch=micro_batch, labelled=any(q not in UNLABELLED for q in asked))
        first = read.batches[0]
        with torch.no_grad():
            found = find_blocks(model, lambda: read.output(first), blocks)
        _require_gradients(model, wanted=True)
        memory = expected_memory(read, found, asked)
        tell = _teller(progress, memory)
        stream, angles = _stream(read, found, asked, tokens, tell)
        drop = pruning_drop(read, found, renumber=renumber, tell=tell("drop")) if "drop" in asked else None
        parameters = found.parameters(model)
        options: dict[str, Any] = {"draws": draws, "exact_below": exact_below, "tol": tol, "products": products, "seed": seed}
        _require_gradients(model, wanted=False)  # Jacobians are with respect to states
        jacobian = jacobians(read, found, **options, tell=tell("jacobian")) if "jacobian" in asked else None
        _require_gradients(model, wanted=True)
        gradient = gradient_norms(read, parameters) if "gradient" in asked else None
        curved = {
            kind: layer_curvature(read, parameters, kind, method=curvature, **options, tell=tell(kind)) if kind in asked else None
            for kind in KINDS
        }
    laws = growth_laws(stream.variance, _theory(found)) if stream is not None and len(found) > 1 else None
    return DepthReport(
        model=type(model).__name__,
        blocks=found.names,
        tokens=tokens,
        stream=stream,
        laws=laws,
        angles=angles,
        drop=drop,
        gradient=gradient,
        jacobians=jacobian,
        **curved,
        memory=memory,
        seconds=time.perf_counter() - start,
    )


def _stream(
    data: Data, blocks: Blocks, asked: tuple[str, ...], tokens: str, tell: Callable[[str], Callable[[int, int], None]]
) -> tuple[StreamStatistics | None, AngularDistances | None]:
    """Run the data once and return what the stream alone tells; checked for NaN whatever was asked for."""
    sums, angles = StreamSums(len(blocks)), AngleSums(len(blocks))
    report = tell("variance")
    with torch.no_grad():
        for number, batch in enumerate(data.batches):
            report(number, len(data.batches))
            with recording(blocks) as found, recording_middles(blocks) as middles:
                data.output(batch)
            check_finite(found, blocks)
            keep = counted_tokens(batch, found.inputs[0])
            if not bool(keep.any()):
                raise InputError(f"{WHO}: no token of batch {number} counts, its mask leaves all of them out; keep at least one")
            last = last_tokens(keep)
            if "variance" in asked:
                sums.add(found.stream, middles, keep if tokens == "all" else last)
            if "angles" in asked:
                angles.add(found.stream, keep, last)
    return sums.result() if "variance" in asked else None, angles.result() if "angles" in asked else None


def _asked(what: str | Iterable[str]) -> tuple[str, ...]:
    wanted = QUANTITIES if what == "all" else (what,) if isinstance(what, str) else tuple(what)
    unknown = [q for q in wanted if q not in QUANTITIES]
    if unknown or not wanted:
        seen = f"{unknown[0]!r}" if unknown else "nothing"
        raise InputError(f"{WHO}: what= asks for {seen}; expected some of {', '.join(map(repr, QUANTITIES))}, or 'all'")
    return tuple(q for q in QUANTITIES if q in wanted)


def _check(tokens: str, curvature: str, draws: int, exact_below: int, tol: float, products: int) -> None:
    for name, value, known in (("tokens", tokens, ("all", "last")), ("curvature", curvature, METHODS)):
        if value not in known:
            raise InputError(f"{WHO}: {name}={value!r} is not known; pass one of {', '.join(map(repr, known))}")
    if draws < 1 or exact_below < 0 or products < 2 or not tol > 0:
        raise InputError(
            f"{WHO}: draws={draws}, exact_below={exact_below}, products={products}, tol={tol}; expected at least 1, 0 and 2, "
            "and a positive tolerance"
        )


def _theory(blocks: Blocks) -> str:
    kinds = {b.own_placement.name if isinstance(b, TransformerBlock) else type(b).__name__ for b in blocks.modules}
    return theory_of(kinds)


def _require_gradients(model: nn.Module, *, wanted: bool) -> None:
    for p in model.parameters():
        p.requires_grad_(wanted and p.is_floating_point())


def _teller(progress: Tell | None, memory: dict[str, int]) -> Callable[[str], Callable[[int, int], None]]:
    if progress is None:
        return lambda name: lambda done, total: None
    return lambda name: partial(progress, f"{name} ({memory.get(name, 0) / 2**20:,.0f} MiB)")
