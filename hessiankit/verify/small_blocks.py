"""Blocks of the same structure as the one under check: tiny for the vec_r formulas, wide for sums in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from derivations.transformer import PostNormBlockAt
from hessiankit.blocks import TransformerBlock
from hessiankit.curvature.dense import hessian
from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.theory.exact.block_structure import structure_of
from hessiankit.theory.formulas.symbols import symbol_of
from hessiankit.verify.comparison import FORMULAS, CheckRow, Judge, Layout, cells_of_labels, closed_form
from hessiankit.verify.health import rounding_noise
from hessiankit.verify.probes import normal, probe_directions
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported

TINY = {"length": 3, "width": 4, "head": 2, "hidden": 5}
"""Sizes of the formulas' twin: unequal, so that a swapped index cannot hide."""


def letter(name: str) -> str:
    """Return the papers' letter of a block's parameter.

    >>> letter("attention.W_Q"), letter("norm_2.weight")
    ('W_Q', 'gamma_2')
    """
    return symbol_of(name).removeprefix("\\")


def point_of(block: TransformerBlock, x: Tensor) -> PostNormBlockAt | None:
    """Return the chapters' formulas for a block at one sequence (L, d_model), or None where there are none.

    They are written for the post-norm block with LayerNorm, one head and no attention biases.
    """
    attention, norm = block.attention, block.norm_1
    is_plain = attention.n_heads == 1 and not attention.rotary and all(getattr(attention, b) is None for b in ("b_Q", "b_O"))
    if block.placement != "post" or not is_plain or block.feedforward.W_G is not None or not isinstance(norm, torch.nn.LayerNorm):
        return None
    arrays = {letter(name): p.detach() for name, p in block.named_parameters()}
    mask = x.new_full((len(x), len(x)), -math.inf).triu(1) if attention.causal else None
    return PostNormBlockAt(X=x, **arrays, mask=mask, eps=norm.eps, activation=block.feedforward.activation)


def formula_rows(block: TransformerBlock, seed: int) -> Iterator[CheckRow]:
    """Compare fast path and formulas, where there are any, pair by pair on a similar block with tiny unequal widths."""
    start, eps = time.perf_counter(), float(getattr(block.norm_1, "eps", None) or 1e-6)
    twin = structure_of(block).block(TINY["width"], TINY["hidden"], d_k=TINY["head"], eps=eps).double()
    generator = torch.Generator().manual_seed(seed)
    x, target = (normal((TINY["length"], TINY["width"]), generator) for _ in range(2))
    for p in twin.parameters():
        p.data = normal(p.shape, generator) * 0.7 + (0.5 if p.ndim == 1 else 0.0)
    point = point_of(twin, x)
    if point is None:
        return
    result = hessian(twin, x, target, handshake=False)
    largest = float(result.matrix.abs().max())
    for i, j in result.pairs():
        formula = point.loss_hessian(target, letter(i), letter(j)).total.dense()
        difference, scale = float((formula - result.block(i, j)).abs().max()), float(formula.abs().max())
        vanishes = max(difference, scale) <= 1e-14 * largest
        error = 0.0 if vanishes else difference / scale if scale else math.inf
        yield CheckRow(f"{i} x {j} (formula)", FORMULAS, error, error <= TOLERANCE, time.perf_counter() - start)


WIDTH, HIDDEN, HEADS, HEAD, LENGTH = 20, 24, 4, 6, 5
"""Widths above 16, where sums are cut into pieces, with few parameters."""

TOLERANCE = 1e-10
JUDGES = ("reverse-over-reverse", "jvp(grad)")


def twin_rows(block: TransformerBlock, seed: int) -> Iterator[CheckRow]:
    """Compare a wide block of the same placement, norm and mask, with four heads, W_O, biases and gelu.

    Its closed form is compared with two references along a direction on each parameter, and its diagonal with that.
    """
    start, s, generator = time.perf_counter(), structure_of(block), torch.Generator().manual_seed(seed)
    is_gated, has_shared_keys = s.activation == "swiglu", s.n_kv_heads < s.n_heads
    kinds = {"activation": s.activation if is_gated else "gelu", "bias": not is_gated, "attention_bias": False}
    heads = {"n_heads": HEADS, "n_kv_heads": HEADS // 2 if has_shared_keys else HEADS, "d_k": HEAD, "output_projection": True}
    twin = s.block(WIDTH, HIDDEN, **kinds, **heads).double()
    for p in twin.parameters():
        p.data = 0.8 + 0.3 * normal(p.shape, generator) if p.ndim == 1 else 0.4 * normal(p.shape, generator)
    x, target = (normal((2, LENGTH, WIDTH), generator) for _ in range(2))
    problem, exact = Problem(twin, x, target), hessian(twin, x, target, handshake=False)
    probes = probe_directions(problem, 1, seed)
    judge = Judge(rounding_noise(problem, JUDGES, torch.float64, closed_form))
    for name in JUDGES:
        try:
            gaps = Layout(problem, probes.owners).gaps(probes.V @ exact.matrix, REFERENCES[name].products(problem, probes.V))
        except Unsupported:
            continue
        yield from judge.rows(gaps, TOLERANCE, name, time.perf_counter() - start, cells_of_labels("wide twin", gaps))
    diagonal, reference = hessian_diagonal(twin, x, target, handshake=False, max_products=None).flat, exact.matrix.diagonal()
    error = float((diagonal - reference).abs().max() / reference.abs().max())
    yield CheckRow("wide twin: diagonal", "hessian", error, error <= TOLERANCE, time.perf_counter() - start)
