"""Points for property tests: a small module of any kind, inputs and targets of any scale, and what their Hessian has to agree with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from curvature_reference import cross_entropy, mse, reverse_over_reverse
from hypothesis import assume, note
from hypothesis import strategies as st
from many_digits import ManyDigits
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS

LOSS = {"mse": mse, "cross_entropy": cross_entropy}
TOLERANCE = 1e-10
SCALES = st.sampled_from([1e-8, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8])
EPS = st.sampled_from([0.0, 1e-30, 1e-12, 1e-5, 1.0, 1e6])
SMOOTH = ("gelu", "gelu_tanh", "silu", "tanh", "identity", "swiglu")
ALWAYS_SMOOTH: dict[str, Any] = {"eps": st.sampled_from([1e-5, 1.0]), "scales": st.just(1.0), "logits": st.just(1.0)}
"""Arguments of :func:`blocks` for points where nothing is extreme."""


@dataclass(frozen=True, repr=False)
class Point:
    """A module, its data, and how it was made."""

    module: nn.Module
    inputs: Tensor
    target: Tensor
    loss: str
    made: str

    def __repr__(self) -> str:
        return self.made

    @property
    def reference(self) -> Tensor:
        """The Hessian by reverse over reverse."""
        return reverse_over_reverse(self.module, self.inputs, self.target, LOSS[self.loss])


@st.composite
def blocks(
    draw: Any,
    *,
    eps: Any = EPS,
    scales: Any = SCALES,
    logits: Any = st.sampled_from([0.1, 1.0, 30.0, 1e3]),  # noqa: B008
    spreads: Any = st.sampled_from([1.0, 1e-3, 1e-6]),  # noqa: B008
) -> Point:
    """A block of any placement and options; inputs and targets of a scale, rows that are nearly constant, large logits.

    Every norm is over three entries or more: LayerNorm of two is a sign up to eps, and torch's derivative what cancels.
    """
    heads = draw(st.sampled_from([1, 2]))
    options = {
        "placement": draw(st.sampled_from(sorted(PLACEMENTS))), "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "activation": draw(st.sampled_from(SMOOTH)), "n_heads": heads, "bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()), "causal": draw(st.booleans()), "rotary": draw(st.booleans()),
        "affine": draw(st.booleans()), "eps": draw(eps),
    }  # fmt: skip
    try:
        width = 6 if options["placement"] == "group-ln" else 4
        module = hk.TransformerBlock(width, 3, d_k=4, d_v=3 if heads > 1 else None, **options).double()
    except hk.InputError:  # options that do not go together
        assume(False)
    samples, length = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seed, scale, largest, spread = draw(st.integers(0, 2**16)), draw(scales), draw(logits), draw(spreads)
    generator = torch.Generator().manual_seed(seed)
    _redraw(module, generator)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith(("W_Q", "W_K")):
                p.mul_(largest**0.5)
    inputs = scale * (_normal(generator, samples, length, 1) + spread * _normal(generator, samples, length, width))
    loss = draw(st.sampled_from(sorted(LOSS)))
    of = draw(scales)
    target = of * _normal(generator, samples, length, width)
    if loss == "cross_entropy":
        target = torch.randint(width, (samples, length), generator=generator)
    made = f"{options}, {samples=}, {length=}, {seed=}, {scale=}, logits={largest}, {spread=}, {loss}, target of {of}"
    return Point(module, inputs, target, loss, made)


@st.composite
def chains(draw: Any, *, scales: Any = SCALES, weights: Any = st.sampled_from([1e-8, 1e-2, 1.0, 1e2, 1e8])) -> Point:  # noqa: B008
    """One to three linear layers, each with a norm or a function behind it, of any widths; inputs, weights, targets of a scale."""
    widths = draw(st.lists(st.integers(3, 5), min_size=2, max_size=4))
    seed, scale, of = draw(st.integers(0, 2**16)), draw(scales), draw(scales)
    eps = draw(st.sampled_from([1e-30, 1e-12, 1e-5, 1.0, 1e6]))
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        norms = [nn.LayerNorm(b, eps), nn.RMSNorm(b, eps)]
        functions = [nn.Identity(), nn.Tanh(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.Softmax(-1)]
        layers += [nn.Linear(a, b, bias=draw(st.booleans())), draw(st.sampled_from(functions + norms))]
    module = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(seed)
    _redraw(module, generator)
    size = draw(weights)
    with torch.no_grad():
        layers[0].weight.mul_(size)  # type: ignore[operator]
    inputs, loss = scale * _normal(generator, 3, widths[0]), draw(st.sampled_from(sorted(LOSS)))
    target = of * _normal(generator, 3, widths[-1])
    if loss == "cross_entropy":
        target = torch.randint(widths[-1], (3,), generator=generator)
    return Point(module, inputs, target, loss, f"{module}, {seed=}, {scale=}, weights of {size}, {loss}, target of {of}")


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _redraw(module: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.6 * _normal(generator, *p.shape) + (0.4 if p.ndim < 2 else 0.0))


def exact(point: Point, **options: Any) -> hk.Hessian:
    """The Hessian; an example is left out where hessiankit says that there is none and the reference is not finite either."""
    refused = ""
    try:
        return hk.hessian(point.module, point.inputs, point.target, loss=point.loss, **options)
    except hk.InputError as error:
        refused = str(error)
    assert "NaN or infin" in refused or "not differentiable there" in refused, refused
    assert not bool(torch.isfinite(point.reference).all()), refused
    assume(False)
    raise AssertionError(refused)


def assert_exact(found: hk.Hessian, point: Point, *, also: int = 0, floor: float = 0.0) -> None:
    """Assert agreement in every block to 1e-10 of its largest entry: with reverse over reverse, else with 400 digits.

    Where the two disagree, the columns in which they do so most are computed in 400 digits, and so is column ``also``. There
    the Hessian may be off by what rounding every number on the way to float64 changes, ten times: the dozens of roundings that
    make an entry, and no more. What the reference itself loses does not count. ``floor`` of the whole matrix's largest entry is
    allowed on top.
    """
    P, floor = len(found.matrix), floor * float(found.matrix.abs().max())
    error = (found.matrix - point.reference).abs()
    columns = {also % P}
    for i, j in itertools.product(found.names, found.names):
        rows, across = found.slices[i], found.slices[j]
        scale = found.matrix[rows, across].abs().max()
        block = error[rows, across]
        if not bool((block <= TOLERANCE * scale + floor).all()):  # NaN too
            columns.add(across.start + int(block.amax(0).nan_to_num(torch.inf).argmax()))
    judge = ManyDigits(point.module, point.inputs, point.target, point.loss)
    for k in sorted(columns):
        j = next(name for name in found.names if found.slices[name].start <= k < found.slices[name].stop)
        column, lost = judge.column(k), None
        for i in found.names:
            rows = found.slices[i]
            scale = float(found.block(i, j).abs().max())
            off = float((found.matrix[rows, k] - column[rows]).abs().max())
            if off <= TOLERANCE * scale + floor:
                continue
            if lost is None:
                lost = torch.stack([judge.column(k, rounded=seed) - column for seed in (1, 2, 3)]).abs().amax(0)
            allowed = TOLERANCE * scale + floor + 10 * float(lost[rows].max())
            note(f"{i} x {j}, column {k}: off by {off:.1e} of {scale:.1e}, rounding takes {float(lost[rows].max()):.1e}; {point}")
            assert off <= allowed, f"{i} x {j}, column {k}: off by {off:.2e}, allowed {allowed:.2e}, largest {scale:.2e}; {point}"
