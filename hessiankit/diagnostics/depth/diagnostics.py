"""``depth_diagnostics``: stream, angles, pruning, gradients, Jacobians and curvature of every block, in one call."""

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
from hessiankit.diagnostics.depth.estimates import Estimator
from hessiankit.diagnostics.depth.jacobians import jacobians
from hessiankit.diagnostics.depth.laws import growth_laws, theory_of
from hessiankit.diagnostics.depth.pruning import pruning_drop
from hessiankit.diagnostics.depth.recording import (
    check_finite,
    counted_tokens,
    expected_memory,
    last_tokens,
    quiet,
    read_data,
    recording,
)
from hessiankit.diagnostics.depth.stream import AngleSums, AngularDistances, StreamStatistics, StreamSums, gradient_norms
from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_name
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
    """Return the depth diagnostics of The Curse of Depth (Sun et al. 2025), corrected: one row a block.

    ``"variance"`` (with rho, update ratio and growth laws), ``"angles"``, ``"drop"`` (one forward pass a block) and
    ``"gradient"`` cost about L + 4 forward passes and a backward pass; ``"jacobian"``, ``"hessian"`` and ``"ggn"`` cost up to
    ``products + draws`` passes of second derivatives a block. docs/depth.md has every formula and its limits.

    The model runs in evaluation mode. Its parameters, buffers, gradients, modes and hooks, and the random states, are afterwards
    what they were, also after an error or Ctrl-C.

    Args:
        model: hessiankit's ``Transformer`` or ``VisionTransformer``, a Hugging Face decoder or encoder, or any module whose
            blocks, in one list, map a hidden state (..., tokens, d) to one: a tensor, or the first entry of a tuple.
        data: A tensor of inputs with ``target``; a pair (inputs, target); a mapping of keyword arguments with ``labels`` (a
            Hugging Face batch: logits[:, :-1] against labels[:, 1:], unless the model's own loss has them in place); or an
            iterable of pairs or mappings. Labels may be left out where no quantity needs a loss. -100 does not count. Tokens
            where ``attention_mask`` is 0 are left out.
        target: Labels, one for each row of logits, or for squared error a tensor of the output's shape.
        blocks: The name of the list of blocks, or the blocks or their names; by default found in a forward pass.
        what: Some of ``"variance", "angles", "drop", "gradient", "jacobian", "hessian", "ggn"``, or ``"all"``.
        tokens: Whether the stream's numbers are means over ``"all"`` counted tokens or the ``"last"`` one of each sequence.
            Angles are given for both.
        loss: ``"cross_entropy"`` or ``"mse"``, a mean over all labels, or entries, that count.
        renumber: With a block removed, whether later blocks' 1 / sqrt(l) moves up; hessiankit's blocks only.
        curvature: How Hessians are multiplied: ``"exact"``, ``"autograd"`` or ``"auto"``; the report says which was used.
        draws: Random probes of Frobenius norms and traces.
        exact_below: States, or parameters of a block, up to which all unit vectors are taken in place of probes.
        tol: Relative tolerance of Lanczos's residuals.
        products: Products of one Lanczos run at most.
        seed: Of probes and first vectors.
        micro_batch: Sequences treated at once; each batch as it is by default.
        progress: Called with (the quantity and its memory, steps done, steps in all).

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
    chosen = _quantities(what)
    check_name(WHO, "tokens", tokens, ("all", "last"))
    check_name(WHO, "curvature", curvature, METHODS)
    estimator = Estimator(draws, exact_below, tol, products, seed)
    start = time.perf_counter()
    with quiet(model):
        labelled = any(q not in UNLABELLED for q in chosen)
        batched = read_data(model, data, target, loss, micro_batch=micro_batch, labelled=labelled)
        with torch.no_grad():
            stack = find_blocks(model, lambda: batched.output(batched.batches[0]), blocks)
        _require_gradients(model, wanted=True)
        memory = expected_memory(batched, stack, chosen)
        tell = _teller(progress, memory)
        stream, angles = _stream(batched, stack, chosen, tokens, tell)
        drop = pruning_drop(batched, stack, renumber=renumber, tell=tell("drop")) if "drop" in chosen else None
        parameters = stack.parameters(model)
        _require_gradients(model, wanted=False)  # Jacobians are with respect to states
        jacobian = jacobians(batched, stack, estimator, tell=tell("jacobian")) if "jacobian" in chosen else None
        _require_gradients(model, wanted=True)
        gradient = gradient_norms(batched, parameters) if "gradient" in chosen else None
        curved = {
            kind: layer_curvature(batched, parameters, kind, method=curvature, estimator=estimator, tell=tell(kind))
            for kind in KINDS
            if kind in chosen
        }
    placements = {b.own_placement.name if isinstance(b, TransformerBlock) else type(b).__name__ for b in stack.modules}
    laws = growth_laws(stream.variance, theory_of(placements)) if stream is not None and len(stack) > 1 else None
    return DepthReport(
        model=type(model).__name__,
        blocks=stack.names,
        tokens=tokens,
        stream=stream,
        laws=laws,
        angles=angles,
        drop=drop,
        gradient=gradient,
        jacobians=jacobian,
        hessian=curved.get("hessian"),
        ggn=curved.get("ggn"),
        memory=memory,
        seconds=time.perf_counter() - start,
    )


def _quantities(what: str | Iterable[str]) -> tuple[str, ...]:
    chosen = QUANTITIES if what == "all" else (what,) if isinstance(what, str) else tuple(what)
    unknown = [q for q in chosen if q not in QUANTITIES]
    if unknown or not chosen:
        seen = f"{unknown[0]!r}" if unknown else "nothing"
        raise InputError(f"{WHO}: what= asks for {seen}; expected some of {', '.join(map(repr, QUANTITIES))}, or 'all'")
    return tuple(q for q in QUANTITIES if q in chosen)


def _stream(
    data: BatchedLoss, blocks: Blocks, chosen: tuple[str, ...], tokens: str, tell: Callable[[str], Callable[[int, int], None]]
) -> tuple[StreamStatistics | None, AngularDistances | None]:
    """Return statistics and angles of the hidden states, from one forward pass a batch; NaN is refused in any case."""
    sums, angles = StreamSums(), AngleSums(len(blocks))
    report = tell("variance")
    with torch.no_grad():
        for number, batch in enumerate(data.batches):
            report(number, len(data.batches))
            with recording(blocks) as stream, recording_middles(blocks) as middles:
                data.output(batch)
            check_finite(stream, blocks)
            counted = counted_tokens(batch, stream.inputs[0])
            if not bool(counted.any()):
                raise InputError(f"{WHO}: no token of batch {number} counts, its mask leaves all of them out; keep at least one")
            last = last_tokens(counted)
            if "variance" in chosen:
                sums.add(stream.states, middles, counted if tokens == "all" else last)
            if "angles" in chosen:
                angles.add(stream.states, counted, last)
    return sums.result() if "variance" in chosen else None, angles.result() if "angles" in chosen else None


def _require_gradients(model: nn.Module, *, wanted: bool) -> None:
    for p in model.parameters():
        p.requires_grad_(wanted and p.is_floating_point())


def _teller(progress: Tell | None, memory: dict[str, int]) -> Callable[[str], Callable[[int, int], None]]:
    if progress is None:
        return lambda name: lambda done, total: None
    return lambda name: partial(progress, f"{name} ({memory.get(name, 0) / 2**20:,.0f} MiB)")
