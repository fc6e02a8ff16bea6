"""What three papers say of block-diagonal curvature, on exact matrices of small models; the tables are docs/block_diagonal.md."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import hessiankit as hk
from papers.block_diagonal.measures import PARTITIONS, partition_labels, shares
from papers.block_diagonal.models import Case, model_of, probe
from papers.block_diagonal.optimiser import losses
from papers.claim import Evidence
from papers.evidence import measured
from papers.registry import claim

CLASSES = (4, 16, 64)
INPUTS, HIDDEN, SAMPLES = 8, 8, 200
FIRST, LAST = 3, 10  # steps: before and on the plateau of the words' frequencies


def one_hidden_layer(classes: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a ReLU network with one hidden layer and PyTorch's random weights, Gaussian inputs and random labels."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(INPUTS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, classes, bias=False)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return nn.Sequential(*layers).double(), x, torch.randint(classes, (SAMPLES,), generator=generator)


def by_neuron(classes: int, seed: int, params: str | None = None) -> float:
    """Return the share of the squares of the exact Hessian, or of that of one weight, in the blocks of single neurons."""
    module, x, y = one_hidden_layer(classes, seed)
    return hk.frobenius_norms(module, x, y, loss="cross_entropy", by="neuron", params=params).diagonal_share


def in_words(values: list[float]) -> str:
    """Return some shares in words."""
    return ", ".join(f"{value:.2f}" for value in values)


def initial_shares(vocabulary: int, seed: int) -> dict[str, float]:
    """Return the shares of the Hessian of a small language model before training, by partition."""
    case = Case(vocabulary, seed=seed)
    model, (x, y) = model_of(case), probe(case)
    operator = hk.hessian_operator(model, x, y, loss="cross_entropy")
    return shares(hk.hessian(model, x, y, loss="cross_entropy").matrix, partition_labels(operator, model))


@claim("classes-within-a-layer", "arXiv:2505.02809, abstract (one hidden layer)", "SEEN AT THIS SIZE")
def classes_within_a_layer(seed: int) -> Evidence:
    """At random initialisation the Hessian with respect to the weights of one layer of a network with one hidden layer becomes
    block-diagonal, a block for each neuron or class, as the number of classes $C$ becomes large."""
    hidden, output = ([by_neuron(C, seed, params) for C in CLASSES] for params in ("0.weight", "2.weight"))
    rising = hidden == sorted(hidden) and output == sorted(output)
    detail = f"share of the squares by neuron for C = {CLASSES}: hidden {in_words(hidden)}, output {in_words(output)}"
    return measured(min(hidden[-1], output[-1]), rising and min(hidden[-1], output[-1]) > 0.9, detail)


@claim("classes-between-layers", "arXiv:2505.02809, abstract (one hidden layer)", "NOT SEEN AT THIS SIZE")
def classes_between_layers(seed: int) -> Evidence:
    """At random initialisation the whole Hessian of a network with one hidden layer, blocks between the layers included, becomes
    block-diagonal by neuron and class as the number of classes $C$ becomes large."""
    whole = [by_neuron(C, seed) for C in CLASSES]
    detail = f"share of the squares by neuron for C = {CLASSES}: {in_words(whole)}; the rest lies between the layers"
    return measured(whole[-1], whole[-1] < whole[0] < 0.5, detail)


@claim("classes-transformer", "arXiv:2505.02809, abstract (language models)", "NOT SEEN AT THIS SIZE")
def classes_transformer(seed: int) -> Evidence:
    """The number of classes is one primary driver of a near-block-diagonal Hessian, which may shed light on language models: of a
    transformer the share by neuron and word rises with the vocabulary."""
    small, large = initial_shares(16, seed), initial_shares(64, seed)
    detail = "; ".join(f"{name}: {small[name]:.2f} with 16 words, {large[name]:.2f} with 64" for name in PARTITIONS)
    return measured(large["neuron"], large["neuron"] < 0.2, f"initial Hessian, 2 blocks of width 8, {detail}")


@claim("layerwise-gauss-newton", "arXiv:2510.09378, abstract", "OPEN")
def layerwise_gauss_newton(seed: int) -> Evidence:
    """A layerwise Gauss-Newton preconditioner, which ignores information between layers, nearly matches the performance of the
    full one."""
    found = losses(Case(32, d_model=4, steps=LAST, seed=seed), arms=("full", "layer"))
    layer, full = found["layer"], found["full"]
    early = (layer[0] - layer[FIRST]) / (full[0] - full[FIRST])
    later = layer[LAST] - full[LAST]
    detail = f"the layerwise steps make {early:.2f} of the full ones' decrease of the held-out loss in {FIRST} steps; "
    detail = f"{detail}after {LAST} steps their loss is higher by {later:+.2f}, with a sign that differs between seeds"
    return measured(later, early > 0.85 and abs(later) < 0.3, detail)


@claim("order-one-error", "arXiv:2602.00816, abstract", "SEEN AT THIS SIZE")
def order_one_error(seed: int) -> Evidence:
    """Block-diagonal approximations of the Hessian of a language model have a relative error of order one."""
    errors = {name: math.sqrt(1 - share) for name, share in initial_shares(64, seed).items()}
    detail = ", ".join(f"{name} {value:.2f}" for name, value in errors.items())
    return measured(errors["tensor"], errors["tensor"] > 0.5, f"relative Frobenius error of the initial Hessian by {detail}")
