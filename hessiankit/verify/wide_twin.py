"""A wide twin of a block under check: the code paths that small sizes do not reach."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from hessiankit.blocks import TransformerBlock
from hessiankit.curvature import hessian
from hessiankit.diagonal import curvature_diagonal
from hessiankit.verify.block_structure import structure_of
from hessiankit.verify.check_report import CheckRow
from hessiankit.verify.comparison import Blocks
from hessiankit.verify.noise import RoundingNoise, closed_form
from hessiankit.verify.probes import probe_directions
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported

WIDTH, HIDDEN, HEADS, HEAD, LENGTH = 20, 24, 4, 6, 5
"""Widths above 16, where sums are cut into pieces; as few parameters as that allows."""

TOLERANCE = 1e-10
JUDGES = ("reverse-over-reverse", "jvp(grad)")


def wide_twin(block: TransformerBlock, seed: int) -> tuple[TransformerBlock, torch.Tensor, torch.Tensor]:
    """Return a block of the same placement, norm and mask with four heads, W_O, biases and gelu; inputs and a target."""
    s = structure_of(block)
    gated = s.activation == "swiglu"
    twin = TransformerBlock(
        WIDTH, HIDDEN, HEADS, s.placement, s.norm, "swiglu" if gated else "gelu", not gated,
        n_kv_heads=HEADS if s.n_kv_heads == s.n_heads else HEADS // 2, d_k=HEAD, output_projection=True, causal=s.causal,
        rotary=s.rotary, norm_scope=s.norm_scope, affine=s.affine, groups=2, layer=s.layer, n_layers=s.n_layers, alpha=s.alpha,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for p in twin.parameters():
        p.data = 0.8 + 0.3 * draw(*p.shape) if p.ndim == 1 else 0.4 * draw(*p.shape)
    return twin, draw(2, LENGTH, WIDTH), draw(2, LENGTH, WIDTH)


def twin_rows(block: TransformerBlock, seed: int) -> Iterator[CheckRow]:
    """Compare the twin's closed form with two references along a direction on each parameter, and its diagonal with it."""
    start = time.perf_counter()
    twin, x, target = wide_twin(block, seed)
    problem, found = Problem(twin, x, target), hessian(twin, x, target, handshake=False)
    probes = probe_directions(problem, 1, seed)
    noise = RoundingNoise(problem, {"closed form": closed_form, **{n: REFERENCES[n].products for n in JUDGES}}, 2.0**-52)
    blocks, mine = Blocks(problem, probes, noise=noise), probes.V @ found.matrix
    for name in JUDGES:
        try:
            theirs = REFERENCES[name].products(problem, probes.V)
        except Unsupported:
            continue
        relative = blocks.relative(*blocks.difference(mine, theirs))
        for b, j in enumerate(blocks.along):
            error = float(relative[:, b].max())
            yield CheckRow(f"wide twin: {j}", name, error, error <= TOLERANCE, time.perf_counter() - start)
    diagonal, whole = curvature_diagonal(twin, x, target, handshake=False, max_products=None).flat, found.matrix.diagonal()
    error = float((diagonal - whole).abs().max() / whole.abs().max())
    yield CheckRow("wide twin: diagonal", "hessian", error, error <= TOLERANCE, time.perf_counter() - start)
