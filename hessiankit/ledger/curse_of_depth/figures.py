"""Figures 1-9 and what is said of trained models, with stand-ins at initialisation."""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.definitions import angle
from hessiankit.ledger.curse_of_depth.stacks import block_jacobian, make_stack, stream
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import bounded, measured, not_run, readings
from hessiankit.ledger.registry import claim


def states(seed: int, depth: int, placement: str = "pre") -> list[Tensor]:
    """Return x_1, ..., x_{L+1} of a stack of width 64 on 64 tokens."""
    blocks = make_stack(seed, depth, placement, d_model=64, d_ff=128, n_heads=4)
    return stream(blocks, Draw(seed).normal(64, 64))


@cache
def distances_from_identity(seed: int, depth: int, placement: str) -> list[float]:
    """Return ||J_l - I||_F / sqrt(n) of each block."""
    X, out = Draw(seed).normal(4, 16), []
    for block in make_stack(seed, depth, placement):
        J = block_jacobian(block, X)
        out.append(float((J - torch.eye(len(J), dtype=torch.float64)).norm()) / math.sqrt(len(J)))
        X = block(X)
    return out


@claim(
    "curse-of-depth/fig1",
    place="Sec. 5.3.1, Fig. 1 (right)",
    statement="LNS has a lower loss than Pre-LN from 60M to 7B parameters, 20B tokens",
    verdict="NOT RUN",
)
def fig1(seed: int) -> Evidence:
    return not_run("pre-training of up to 7B parameters")


@claim(
    "curse-of-depth/fig2-drop",
    place="Sec. 2.1, Fig. 2 (top)",
    statement="removing a layer beyond the 18th of Qwen3-8B, DeepSeek-7B or LLaMA2-13B hardly matters; in BERT-Large "
    "the deep ones do",
    verdict="NOT RUN",
)
def fig2_drop(seed: int) -> Evidence:
    return not_run("weights of 0.3B to 13B parameters and benchmarks that are not at hand; no numbers in the text")


@claim(
    "curse-of-depth/fig2-angle",
    place="Sec. 2.1, Fig. 2 (bottom)",
    statement="DeepSeek-7B's angular distance is below 0.2 after layer 18, nearly half of Qwen3-8B's are",
    verdict="NOT RUN",
)
def fig2_angle(seed: int) -> Evidence:
    return not_run("weights that are not at hand; the released heat maps are scaled row by row to [0, 1]")


@claim(
    "curse-of-depth/fig3",
    place="Sec. 2.2, Fig. 3",
    statement="in LLaMA-130M angle and performance drop fall with depth with Pre-LN and rise with Post-LN",
    verdict="NOT RUN",
)
def fig3(seed: int) -> Evidence:
    return not_run("two pre-trainings of 130M parameters")


@claim(
    "ours/fig3-at-init",
    place="The Curse of Depth, Sec. 2.2 and Fig. 3, at initialisation",
    statement=r"$\|J_\ell - I\|$ falls with depth with Pre-LN and does not with Post-LN",
    verdict="REPRODUCED",
    uses=[eq.pre, eq.post],
)
def fig3_at_init(seed: int) -> Evidence:
    falls = {}
    for name in ("pre", "post"):
        found = distances_from_identity(seed, 10, name)
        falls[name] = sum(found[-3:]) / sum(found[:3])
    text = f"last three blocks of 10 over the first three: Pre-LN {falls['pre']:.2f}, Post-LN {falls['post']:.2f}"
    return measured(falls["pre"], falls["pre"] < 0.8 < falls["post"], text)


@claim(
    "curse-of-depth/fig4",
    place="Sec. 5.4, Fig. 4",
    statement="LLaMA-130M, 10 000 steps: variance to 175 with Pre-LN and with Scaled Initialization, below 25 with LNS",
    verdict="NOT RUN",
)
def fig4(seed: int) -> Evidence:
    return not_run("three pre-trainings of 130M parameters")


@claim(
    "ours/fig4-at-init",
    place="The Curse of Depth, Sec. 5.4 and Fig. 4, at initialisation",
    statement="LNS lowers the variance of the last stream",
    verdict="REPRODUCED",
    uses=[eq.pre, eq.lns],
)
def fig4_at_init(seed: int) -> Evidence:
    last = {name: float(states(seed, 24, name)[-1].var(correction=0)) for name in ("pre", "lns")}
    text = f"variance after 24 blocks: Pre-LN {last['pre']:.2f}, LNS {last['lns']:.2f}"
    return measured(last["lns"] / last["pre"], last["lns"] < 0.6 * last["pre"], text)


@claim(
    "curse-of-depth/fig5",
    place="Sec. 5.3.1, Fig. 5",
    statement="OLMo-7B: LNS is slower at first and ends lower",
    verdict="NOT RUN",
)
def fig5(seed: int) -> Evidence:
    return not_run("pre-training of 7B parameters")


@claim(
    "curse-of-depth/fig6",
    place="Sec. 5.5, Fig. 6",
    statement="with LNS the performance drop is more uniform over the layers of LLaMA-130M, and deep layers matter more",
    verdict="NOT RUN",
)
def fig6(seed: int) -> Evidence:
    return not_run("two pre-trainings of 130M parameters")


@claim(
    "ours/fig6-at-init",
    place="The Curse of Depth, Sec. 5.5 and Fig. 6, at initialisation",
    statement=r"LNS makes $\|J_\ell - I\|$ more uniform over depth than Pre-LN",
    verdict="NOT REPRODUCED",
    corrected=r"it falls faster with LNS. It says nothing about trained models",
    uses=[eq.pre, eq.lns],
)
def fig6_at_init(seed: int) -> Evidence:
    falls = {}
    for name in ("pre", "lns"):
        found = distances_from_identity(seed, 10, name)
        falls[name] = sum(found[-3:]) / sum(found[:3])
    text = f"last three blocks of 10 over the first three: Pre-LN {falls['pre']:.2f}, LNS {falls['lns']:.2f}"
    return measured(falls["lns"] / falls["pre"], falls["lns"] < falls["pre"], text)


@claim(
    "curse-of-depth/sec5.5-angle",
    place="Sec. 5.5, Fig. 6 (right)",
    statement="with LNS 'most layers show a substantial angular distance, exceeding 0.6, from their adjacent layers'",
    verdict="VAGUE",
    corrected=r"in the units of Eq. 1 that is $\cos < -0.309$, for which a block has to erase and reverse the stream; "
    r"after the released "
    r"code's scaling of each row to [0, 1] some entries exceed 0.6 by construction",
    uses=[eq.lns],
)
def sec55_angle(seed: int) -> Evidence:
    X = states(seed, 16, "lns")
    adjacent = torch.stack([angle(a, b).mean() for a, b in itertools.pairwise(X)])
    scaled = (adjacent - adjacent.min()) / (adjacent.max() - adjacent.min())
    found = {"largest as in Eq. 1": float(adjacent.max()), "largest after scaling the row": float(scaled.max())}
    return readings(found, "16 LNS blocks at initialisation")


@claim(
    "ours/angle-reversal",
    place="The Curse of Depth, Eq. 1 and Sec. 5.5",
    statement=r"$d(x, x + f) > \frac12$ needs $x\cdot f < -\|x\|^2$",
    verdict="HOLDS",
)
def angle_reversal(seed: int) -> Evidence:
    draw = Draw(seed)
    x, f = draw.normal(20_000, 4), draw.normal(20_000, 4, std=3.0)
    far = angle(x, x + f) > 0.5
    ratios = (x.square().sum(1) / -(x * f).sum(1))[far]
    return bounded(ratios, f"||x||^2 / (-x f) of {int(far.sum())} pairs further apart than 1/2", attained=0.99)


@claim(
    "ours/angle-at-init",
    place="The Curse of Depth, Eq. 1",
    statement=r"at initialisation, where branches are uncorrelated with the stream, $d(x^\ell, x^{\ell+n}) = \frac1\pi\arccos"
    r"\frac{\sigma_\ell}{\sigma_{\ell+n}}$ to 0.06: the angle follows from the variances",
    verdict="REPRODUCED",
    uses=[TransformerBlock],
)
def angle_at_init(seed: int) -> Evidence:
    X = states(seed, 12)
    rms = [float(x.square().mean().sqrt()) for x in X]
    worst = 0.0
    for n in (1, 4, 8):
        for k in range(len(X) - n):
            worst = max(worst, abs(float(angle(X[k], X[k + n]).mean()) - math.acos(min(1.0, rms[k] / rms[k + n])) / math.pi))
    return measured(worst, worst < 0.06, "largest difference over 12 blocks of width 64, n = 1, 4, 8")


@claim(
    "curse-of-depth/fig8",
    place="App. B, Fig. 8",
    statement="the variance of LLaMA-130M with Pre-LN follows 'an exponential growth pattern' at steps 1 000, 3 000 "
    "and 6 000, which "
    "the caption calls epochs",
    verdict="NOT RUN",
)
def fig8(seed: int) -> Evidence:
    return not_run(
        "pre-training of 130M parameters; no numbers in the text. At initialisation it is linear: ours/variance-linear-at-init"
    )


@claim(
    "curse-of-depth/fig9",
    place="App. C, Fig. 9",
    statement="Qwen2.5-VL-7B: the drop is uniform in the vision branch and falls with depth in the language branch",
    verdict="NOT RUN",
)
def fig9(seed: int) -> Evidence:
    return not_run("weights of 7B parameters that are not at hand")


@claim(
    "curse-of-depth/half-of-layers",
    place="Abstract; Sec. 8",
    statement="'nearly half of the layers are less effective than expected' in modern LLMs",
    verdict="NOT RUN",
)
def half(seed: int) -> Evidence:
    return not_run("weights that are not at hand; what is expected is not defined")
