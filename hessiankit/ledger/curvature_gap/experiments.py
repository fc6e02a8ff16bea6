"""Figures and tables: what a small computation can say of them, and what would have to be trained."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.convergence import running_means
from hessiankit.ledger.curvature_gap.derivatives import hessian_of
from hessiankit.ledger.curvature_gap.notation import spectral
from hessiankit.ledger.curvature_gap.point import BlockPoint, BlockSizes, layer_norm
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import counts, measured, not_run
from hessiankit.ledger.registry import claim

MNIST = {"patch": 4, "d": 16, "d_ff": 64, "blocks": 1, "side": 28, "channels": 1, "classes": 10}
CIFAR = {"patch": 4, "d": 128, "d_ff": 512, "blocks": 8, "side": 32, "channels": 3, "classes": 100}
UNSTATED = (
    "optimizer, learning rate, batch size, epochs, heads, output projection, activation, biases, positional embedding, "
    "initialisation, eps and seeds are not stated"
)


def parameters(table: dict[str, int]) -> int:
    """Return the parameters of a row of Table 1: one head, no W_O, biases, positional embedding, mean pooling."""
    d, d_ff, tokens = table["d"], table["d_ff"], (table["side"] // table["patch"]) ** 2
    embedding = table["channels"] * table["patch"] ** 2 * d + d + tokens * d
    block = 3 * d * d + d * d_ff + d_ff + d_ff * d + d + 4 * d
    return embedding + table["blocks"] * block + d * table["classes"] + table["classes"]


def slope(differences: Tensor, start: int = 10) -> float:
    """Return the slope of log |L_{k+1} - L_k| over log k from k = start on."""
    k = torch.arange(1, len(differences) + 1, dtype=differences.dtype)[start:].log()
    y = differences[start:].log()
    k, y = k - k.mean(), y - y.mean()
    return float(k @ y / (k @ k))


def average_differences(losses: Tensor, orders: int, draw: Draw) -> Tensor:
    """Return |L_{k+1} - L_k| averaged over orders of the samples."""
    shuffled = [losses[torch.randperm(len(losses), generator=draw.generator)] for _ in range(orders)]
    return torch.stack([running_means(x).diff().abs() for x in shuffled]).mean(0)


@claim(
    "curvature-gap/table1",
    place="Table 1 and Sec. 5",
    statement=r"the CIFAR-100 model has $8\times$ more blocks and is $8\times$ wider than the MNIST model",
    verdict="HOLDS",
)
def table1(seed: int) -> Evidence:
    ratios = {CIFAR[name] // MNIST[name] for name in ("blocks", "d", "d_ff")}
    return counts(ratios.pop() if len(ratios) == 1 else 0, 8, "blocks, hidden and ff dimension of Table 1")


@claim(
    "curvature-gap/table1-hessian",
    place="Table 1 and Figs. 3-4",
    statement="the exact Hessian of the MNIST configuration is within reach, that of the CIFAR-100 configuration is not",
    verdict="REPRODUCED",
)
def table1_hessian(seed: int) -> Evidence:
    small, large = (parameters(table) ** 2 * 4 / 2**30 for table in (MNIST, CIFAR))
    detail = f"{parameters(MNIST)} and {parameters(CIFAR)} parameters: {small:.2g} and {large:.3g} GiB in float32"
    return measured(large / small, small < 1 and large > 1000, detail)


@claim(
    "curvature-gap/fig1",
    place="Fig. 1 and Fig. 2",
    statement="loss surfaces that converge, the block, the architecture",
    verdict="NOT RUN",
)
def fig1(seed: int) -> Evidence:
    return not_run("drawings, without data")


def at_initialisation(draw: Draw) -> BlockPoint:
    """Return the block of Table 1, narrower, with weights of variance 1/fan-in, tokens and target of variance 1."""
    L, d_V, d_K, d_ff = sizes = BlockSizes(4, 4, 4, 8)
    shapes = {"1": (d_V, d_ff), "2": (d_ff, d_V), "K": (d_V, d_K), "Q": (d_V, d_K), "V": (d_V, d_V)}
    weights = {i: draw.normal(*shape, std=shape[0] ** -0.5) for i, shape in shapes.items()}
    return BlockPoint(sizes, draw.normal(L, d_V), weights, draw.normal(L, d_V))


@claim(
    "curvature-gap/fig3",
    place="Fig. 3",
    statement="at initialisation the Hessian's blocks differ widely, and those of the Values are larger (than those of Q and K)",
    verdict="NOT RUN",
)
def fig3(seed: int) -> Evidence:
    draw = Draw(seed)
    found = []
    for _ in range(5):
        p = at_initialisation(draw)
        H = hessian_of(p.loss, p.vector)
        own = {i: spectral(H[p.place(i), p.place(i)]) for i in ("K", "Q", "V")}
        found.append(own["V"] / max(own["K"], own["Q"]))
    middle = sorted(found)[2]
    detail = "on random tokens ||H_VV|| / max(||H_KK||, ||H_QQ||) is this in the median of five blocks: it depends on the data"
    return not_run(f"takes MNIST, which is not at hand; {detail}", middle)


@claim(
    "curvature-gap/fig4",
    place="Fig. 4",
    statement="after training to > 50 % accuracy every block is larger, and the Values-Values block the largest",
    verdict="NOT RUN",
)
def fig4(seed: int) -> Evidence:
    return not_run(f"takes training on MNIST, which is not at hand; {UNSTATED}", float(parameters(MNIST)))


@claim(
    "curvature-gap/fig5",
    place="Fig. 5",
    statement="the norms of the Keys' and Values' blocks and Hessians are the highest, on one batch of 128",
    verdict="NOT RUN",
)
def fig5(seed: int) -> Evidence:
    return not_run(
        f"takes the model of Fig. 4; which norm is plotted is not stated, and Figs. 3-4 name the Values only; {UNSTATED}"
    )


@claim(
    "curvature-gap/fig6-slope",
    place="Fig. 6",
    statement=r"$|\mathcal{L}_{k+1}(w) - \mathcal{L}_k(w)|$ falls as $1/k$: slope $-1$ in log-log scale",
    verdict="REPRODUCED",
)
def fig6_slope(seed: int) -> Evidence:
    draw = Draw(seed)
    tokens, W, target = draw.normal(600, 1, 4), draw.normal(4, 4), draw.normal(600, 1, 4)
    losses = torch.stack([(layer_norm(x @ W) - t).square().mean() for x, t in zip(tokens, target, strict=True)])
    found = slope(average_differences(losses, 40, draw))
    return measured(found, abs(found + 1) < 0.1, "600 samples, one LayerNorm of random weights, 40 orders of the samples")


@claim(
    "curvature-gap/fig6-evidence",
    place="Fig. 6 and Sec. 6",
    statement="the log-log trend of Fig. 6 supports Theorem 7 and a local geometry of the Transformer that settles",
    verdict="NOT REPRODUCED",
)
def fig6_evidence(seed: int) -> Evidence:
    draw = Draw(seed)
    found = slope(average_differences(draw.uniform(600), 40, draw))
    detail = (
        "the same slope for 600 uniform random numbers, without any model; the protocol has w = w*, where the Hessian term is 0"
    )
    return measured(found, abs(found + 1) < 0.1, detail)


@claim(
    "curvature-gap/fig6-model",
    place="Fig. 6",
    statement="the same for the CIFAR-100 model trained to > 50 % accuracy",
    verdict="NOT RUN",
)
def fig6_model(seed: int) -> Evidence:
    return not_run(f"takes training on CIFAR-100; {UNSTATED}", float(parameters(CIFAR)))


@claim(
    "curvature-gap/fig7-11",
    place="App. A.1, Figs. 7-11",
    statement="entries, norms and Hessians of Queries, Keys, Values, LayerNorm and FeedForward over 1000 steps",
    verdict="NOT RUN",
)
def fig7_11(seed: int) -> Evidence:
    return not_run(f"takes the training of Fig. 4; Fig. 10 shows gamma and beta, which the theory fixes; {UNSTATED}")


@claim(
    "curvature-gap/fig12",
    place="App. A.2, Fig. 12",
    statement="Assumption 1 holds better with more samples",
    verdict="NOT RUN",
)
def fig12(seed: int) -> Evidence:
    return not_run("takes a trained model; what is on the y-axis is not stated. For all k it would ask for interpolation")


@claim(
    "curvature-gap/sec6-cross-entropy",
    place="Sec. 6",
    statement="the generalisation to cross-entropy 'has been explicitly validated in our experimental section 5'",
    verdict="NOT RUN",
)
def sec6_cross_entropy(seed: int) -> Evidence:
    return not_run("Sec. 5 does not name its loss; the closed forms for cross-entropy are rows of ours")
