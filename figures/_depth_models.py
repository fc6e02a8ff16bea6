"""The models that the figures of The Curse of Depth and of HybridNorm train, and the picture of a run's variance by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from figures._runs import ByteSpec
from figures._verdicts import unreached
from hessiankit.training.monitoring.log import shades


@dataclass(frozen=True)
class Size:
    """What the runs of a figure share.

    Attributes:
        layers: Blocks.
        d_model: Width of a token.
        heads: Attention heads.
        length: Bytes of a sequence.
        batch_size: Sequences an update.
        steps: Updates.
        windows: Held-out sequences that losses are measured on.
        text: Source of ``hessiankit.cli.text.load_text``.
    """

    layers: int
    d_model: int = 64
    heads: int = 4
    length: int = 64
    batch_size: int = 8
    steps: int = 400
    windows: int = 64
    text: str = "stdlib"

    @property
    def d_ff(self) -> int:
        """Width of the SwiGLU network, 8/3 of the model's as in both papers, rounded to a multiple of 4.

        >>> Size(12).d_ff
        172
        """
        return 4 * round(2 * self.d_model / 3)


TINY = Size(layers=4, d_model=16, heads=2, length=16, batch_size=4, steps=30, windows=8)
"""Of quick modes."""

PRINTED_STEPS = 10_000
"""Steps of LLaMA-130M in The Curse of Depth, Figure 4. Claims that LNS is better need them: in Figure 5 it is slower at first."""
PRINTED_TOKENS = 400e9
"""Tokens of HybridNorm's Tables 3 to 5, whose placements differ by 0.01 to 0.03 nats at the end."""

CURSE = {
    "Post-LN": ("post", "normal"),
    "Pre-LN": ("pre", "normal"),
    "Pre-LN, scaled init": ("pre", "scaled"),
    "LNS": ("lns", "normal"),
}
"""Methods of The Curse of Depth: placement and initialisation."""
CURSE_COLOURS = {"Pre-LN": "#000000", "LNS": "#0072b2", "Post-LN": "#d55e00", "Pre-LN, scaled init": "#009e73"}
CURSE_MARKS = {"Pre-LN": "o", "LNS": "s", "Post-LN": "^", "Pre-LN, scaled init": "D"}

EMBEDDING_STD = sqrt(2 / 5)
"""Of the authors' code when the paper's models were trained; since January 2026 it has 0.02."""


def llama(method: str, size: Size, seed: int) -> ByteSpec:
    """Return a run of The Curse of Depth's recipe, LLaMA-130M's: RMSNorm, SwiGLU, rotary positions, an untied head.

    Matrices have standard deviation 0.02 sqrt(768 / d_model), so that a matrix multiplies norms as at the paper's width of 768.
    The learning rate is twice the paper's 1e-3, cosine to a tenth of it. AdamW decays matrices by 0.1 and gradients are cut at
    norm 1, where the paper does neither. The monitor follows the variance by layer.

    Args:
        method: A key of :data:`CURSE`.
        size: What the runs share.
        seed: Of initial parameters and batches.
    """
    placement, initialisation = CURSE[method]
    return ByteSpec(
        f"curse-{placement}-{initialisation}-{seed}", placement=placement, initialisation=initialisation, tied=False,
        std=0.02 * sqrt(768 / size.d_model), embedding_std=EMBEDDING_STD, block=(("eps", 1e-6),), lr=2e-3, floor=0.1,
        every=max(1, size.steps // 20), log_spaced=False, measured=("variance",), batches=2, **_shared(size, seed),
    )  # fmt: skip


def olmo(placement: str, initialisation: str, size: Size, seed: int, *, measured: tuple[str, ...] = ()) -> ByteSpec:
    """Return a run of HybridNorm's recipe, OLMo's: RMSNorm, SwiGLU, rotary positions, one key and value head for four queries.

    Head and embedding are one matrix; weights are drawn as the paper's schemes say for this width; AdamW, weight decay 0.1,
    gradients cut at norm 1, cosine to a tenth of the learning rate, as in its Table 7. The learning rate is ten times its 3e-4.

    Args:
        placement: Where the norms stand.
        initialisation: ``"normal"``, ``"depth-scaled"`` or ``"megatron"``.
        size: What the runs share.
        seed: Of initial parameters and batches.
        measured: What a monitor measures on the way, at the first step and the last; without it there is no monitor.
    """
    return ByteSpec(
        f"hybrid-{placement.replace('*', '-star')}-{initialisation}-{seed}", placement=placement, initialisation=initialisation,
        std=None, block=(("n_kv_heads", max(1, size.heads // 4)),), lr=3e-3, floor=0.1, every=size.steps if measured else 0,
        log_spaced=False, measured=measured, **_shared(size, seed),
    )  # fmt: skip


def short_of(spec: ByteSpec) -> str:
    """Return how many of the tokens of HybridNorm's tables a run reads.

    >>> short_of(olmo("pre", "normal", Size(8, steps=240), 0))
    'million tokens: 0.123 here, 400 000 in print'
    """
    return unreached(million_tokens=(spec.steps * spec.batch_size * spec.length / 1e6, PRINTED_TOKENS / 1e6))


def _shared(size: Size, seed: int) -> dict[str, Any]:
    return {
        "layers": size.layers, "d_model": size.d_model, "heads": size.heads, "d_ff": size.d_ff, "length": size.length,
        "norm": "rmsnorm", "activation": "swiglu", "rotary": True, "steps": size.steps, "batch_size": size.batch_size,
        "evaluations": 10, "windows": size.windows, "seed": seed, "text": size.text,
    }  # fmt: skip


def over_training(axes: Axes, steps: Sequence[int] | np.ndarray, variance: np.ndarray, limits: tuple[float, float]) -> None:
    """Draw variances (steps, layers), one line a layer, pale and shallow to dark and deep."""
    for values, colour in zip(variance.T, shades(variance.shape[1]), strict=True):
        axes.plot(steps, values, color=colour)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.set_xlim(steps[0], steps[-1])
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
