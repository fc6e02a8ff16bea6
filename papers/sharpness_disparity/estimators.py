"""Section 3.2: the diagonal Fisher matrix, its estimator, and the average sharpness."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.loss import CrossEntropyAt
from hessiankit.blocks import Transformer
from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.training.optim import block_types
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, readings, relative_error, small
from papers.notation import dense
from papers.registry import claim


@dataclass(frozen=True)
class Classifier:
    """A network with C classes on B inputs: every vector of labels can be gone through."""

    X: Tensor
    W_1: Tensor
    W_2: Tensor

    @staticmethod
    def draw(seed: int, B: int = 3, C: int = 3) -> Classifier:
        """Return a generic point."""
        draw = Draw(seed)
        return Classifier(draw.normal(B, 4), draw.normal(4, 5, std=0.7), draw.normal(5, C))

    @property
    def theta(self) -> Tensor:
        """All parameters."""
        return torch.cat([self.W_1.reshape(-1), self.W_2.reshape(-1)])

    def logits(self, theta: Tensor) -> Tensor:
        """f(X; theta), B x C."""
        k = self.W_1.numel()
        return torch.tanh(self.X @ theta[:k].reshape(self.W_1.shape)) @ theta[k:].reshape(self.W_2.shape)

    @property
    def P(self) -> Tensor:
        """softmax(f), B x C."""
        return self.logits(self.theta).softmax(1)

    @property
    def scores(self) -> Tensor:
        """The gradient of -log p(c | x_b), B x C x #."""
        J = jacobian_of(lambda theta: -self.logits(theta).log_softmax(1), self.theta)
        return J.reshape(*self.P.shape, -1)

    @property
    def fisher(self) -> Tensor:
        """Diag F: the mean over b of the expected squared score."""
        return (self.P[..., None] * self.scores.square()).sum(1).mean(0)

    def expected(self, multiplier: float, weights: Tensor) -> Tensor:
        """Return multiplier times E[(mean score)^2] over all label vectors, these with probabilities ``weights``, C^B of them."""
        B, C = self.P.shape
        scores, total = self.scores, torch.zeros_like(self.theta)
        for weight, labels in zip(weights, itertools.product(range(C), repeat=B), strict=True):
            total += weight * scores[range(B), list(labels)].mean(0).square()
        return multiplier * total

    def independent(self, P: Tensor) -> Tensor:
        """Return the probability of each label vector where labels are independent with rows P."""
        B, C = P.shape
        return torch.stack([P[range(B), list(labels)].prod() for labels in itertools.product(range(C), repeat=B)])


def unbiased(point: Classifier) -> Evidence:
    """Compare the expectation of Eq. 3 over all label vectors with the Fisher diagonal."""
    B = len(point.X)
    return agrees(point.expected(B, point.independent(point.P)), point.fisher, f"all {3**B} label vectors")


def bias(point: Classifier, weights: Tensor) -> float:
    """Return the relative error of the expectation under another law of labels."""
    return relative_error(point.expected(len(point.X), weights), point.fisher)


@claim("eq3", "Sec. 3.2, Eq. 3", "HOLDS", uses=[hessian_diagonal])
def eq3(seed: int) -> Evidence:
    r"""$\mathrm{diag}(\hat F_{\mathrm{eff}}) = B\cdot\nabla\hat{\mathcal{L}}_B\odot\nabla\hat{\mathcal{L}}_B$ with $\hat
    y_b\sim\mathrm{softmax}(f(x_b))$ is unbiased: $\mathbb{E}_{\hat y}[\mathrm{diag}(\hat F_{\mathrm{eff}})] =
    \mathbb{E}_{\hat y}[\mathrm{diag}(\hat F)]$"""
    return unbiased(Classifier.draw(seed))


@claim("eq3-labels", "Sec. 3.2, Eq. 3, with the data's labels", "HOLDS UNDER ASSUMPTION")
def labels(seed: int) -> Evidence:
    """Eq. 3 gives the diagonal Fisher matrix
    Needs: labels drawn from the model's own softmax; with the data's labels it is biased, for the empirical Fisher matrix too"""
    point = Classifier.draw(seed)
    target = F.one_hot(Draw(seed + 1).integers(0, 3, 3), 3).double()
    return assumed(unbiased(point), bias(point, point.independent(target)), above=0.05)


@claim("eq3-independence", "Sec. 3.2, Eq. 3, with shared random numbers", "HOLDS UNDER ASSUMPTION")
def independence(seed: int) -> Evidence:
    """Eq. 3 gives the diagonal Fisher matrix
    Needs: labels independent of one another; one random number for all positions leaves the law of each label right but
    biases the estimate"""
    point = Classifier.draw(seed)
    edges = torch.cat([torch.zeros(3, 1, dtype=torch.float64), point.P.cumsum(1)], 1)
    weights = []
    for labels in itertools.product(range(3), repeat=3):  # the length of {u: every b has its label}
        low = max(float(edges[b, c]) for b, c in enumerate(labels))
        high = min(float(edges[b, c + 1]) for b, c in enumerate(labels))
        weights.append(max(high - low, 0.0))
    return assumed(unbiased(point), bias(point, torch.tensor(weights, dtype=torch.float64)), above=0.01)


@claim("eq3-temperature", "Sec. 3.2, Eq. 3, with other labels of the model", "HOLDS UNDER ASSUMPTION")
def temperature(seed: int) -> Evidence:
    """Eq. 3 gives the diagonal Fisher matrix
    Needs: temperature 1; with temperature 1/2, or the most likely label, it is biased"""
    point = Classifier.draw(seed)
    logits = point.logits(point.theta)
    cold = bias(point, point.independent((2 * logits).softmax(1)))
    greedy = bias(point, point.independent(F.one_hot(logits.argmax(1), 3).double()))
    return assumed(unbiased(point), min(cold, greedy), above=0.005)


@claim("eq3-b", "Sec. 3.2, Eqs. 3-4; App. A.1, 'B set to 1024'", "VAGUE")
def factor(seed: int) -> Evidence:
    """the factor $B$, the number of inputs $x_b$ in a batch
    Correct: $B$ is the number of independently labelled terms in the mean: all tokens of the batch. With the number of
    sequences the estimate is smaller by the length of a sequence. The order of blocks is the same"""
    point = Classifier.draw(seed, B=4)
    weights = point.independent(point.P)
    of_fisher = {
        "B = 4 tokens": float((point.expected(4, weights) / point.fisher).mean()),
        "B = 2 sequences of 2 tokens": float((point.expected(2, weights) / point.fisher).mean()),
    }
    return readings(of_fisher, "the expected estimate over the Fisher diagonal")


@claim("eq3-near-minima", "Sec. 3.2, first paragraph", "HOLDS UNDER ASSUMPTION", uses=[hessian_diagonal])
def near_minima(seed: int) -> Evidence:
    """the Fisher (Gauss-Newton) matrix approximates the Hessian, 'particularly near minima'
    Needs: labels that follow the model's softmax, under which the expected Hessian is the Fisher matrix; at a random point
    with labels of data the diagonals differ, and the Hessian's has negative entries"""
    point = Classifier.draw(seed)
    P = point.P

    def diagonal(labels: Tensor) -> Tensor:
        """Return the Hessian's diagonal at labels, or their probabilities, B x C."""
        return hessian_of(lambda theta: -(labels * point.logits(theta).log_softmax(1)).sum(1).mean(), point.theta).diagonal()

    holds = agrees(diagonal(P), point.fisher, "the Hessian's diagonal in expectation")
    target = F.one_hot(Draw(seed + 1).integers(0, 3, 3), 3)
    return assumed(holds, relative_error(diagonal(target), point.fisher), above=0.1)


@claim("fisher-is-gauss-newton", "Sec. 3.2, 'Fisher (Gauss-Newton)'", "HOLDS", uses=[CrossEntropyAt.hessian, hessian_diagonal])
def gauss_newton(seed: int) -> Evidence:
    """for cross-entropy the Fisher matrix is the Gauss-Newton matrix"""
    point = Classifier.draw(seed)
    J = jacobian_of(point.logits, point.theta)
    middle = dense(CrossEntropyAt(point.logits(point.theta), [0, 0, 0]).hessian("logits", "logits"))
    first, last = torch.nn.Linear(4, 5, False).double(), torch.nn.Linear(5, 3, False).double()
    network = torch.nn.Sequential(first, torch.nn.Tanh(), last)
    with torch.no_grad():
        first.weight.copy_(point.W_1.T)
        last.weight.copy_(point.W_2.T)
    diagonal = hessian_diagonal(network, point.X, torch.zeros(3, dtype=torch.int64), loss="cross_entropy", kind="ggn")
    from_library = torch.cat([diagonal["0.weight"].T.reshape(-1), diagonal["2.weight"].T.reshape(-1)])
    found = [(J.T @ middle @ J).diagonal(), from_library]
    return agrees(found, [point.fisher, point.fisher], "the closed form and hessian_diagonal against the expected squared scores")


@claim("eq4", "Sec. 3.2, Eq. 4", "HOLDS", uses=[hessian_diagonal, block_types])
def eq4(seed: int) -> Evidence:
    r"""$\mathcal{S}(\theta[\bullet]) = \frac{\mathrm{Tr}(h(\theta[\bullet]))}{\#(\theta[\bullet])} =
    \frac{B\,\|\nabla_{\theta[\bullet]}\hat{\mathcal{L}}_B\|_F^2}{\#(\theta[\bullet])}$"""
    model, tokens = tiny_model(seed), Draw(seed).integers(0, 4, 1, 2)
    exact = sharpness(model, tokens)
    log_p = model(tokens)[0].log_softmax(1)
    probabilities = log_p.detach().exp()
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    found, types = dict.fromkeys(exact, 0.0), block_types(model)
    sizes = {t: sum(p.numel() for name, p in model.named_parameters() if types[name] == t) for t in exact}
    for pair in itertools.product(range(4), repeat=2):
        loss = -log_p[range(2), list(pair)].mean()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        weight = float(probabilities[range(2), list(pair)].prod())
        for name, g in zip(names, gradients, strict=True):
            found[types[name]] += weight * 2 * float(g.square().sum()) / sizes[types[name]]
    errors = [relative_error(found[t], exact[t]) for t in exact]
    return small(errors, f"all 16 label pairs, types {', '.join(exact)}, against the exact Gauss-Newton diagonal")


def tiny_model(seed: int) -> Transformer:
    """Return a model of two blocks with a vocabulary of four."""
    options: dict[str, Any] = {"placement": "pre", "activation": "gelu", "causal": True, "max_len": 8}
    return Transformer(4, 4, 6, 2, 2, seed=seed, **options).double()


def sharpness(model: Transformer, tokens: Tensor) -> dict[str, float]:
    """Return Eq. 4 of each block type from the exact Gauss-Newton diagonal; labels do not enter it."""
    diagonal = hessian_diagonal(model, tokens, tokens, loss="cross_entropy", kind="ggn")
    types = block_types(model)
    values: dict[str, list[Tensor]] = {}
    for name, value in diagonal.values.items():
        values.setdefault(types[name], []).append(value.reshape(-1))
    return {t: float(torch.cat(parts).mean()) for t, parts in values.items()}


@claim("remark3.1", "Remark 3.1", "HOLDS", uses=[hessian_diagonal, block_types])
def pooled(seed: int) -> Evidence:
    """in Eq. 4 the sharpness is averaged over all blocks of a type rather than within each block
    Correct: Eq. 4 pools: it is the mean of the blocks' own averages, weighted by their numbers of parameters"""
    model, tokens = tiny_model(seed), Draw(seed).integers(0, 4, 2, 4)
    diagonal, types = hessian_diagonal(model, tokens, tokens, loss="cross_entropy", kind="ggn"), block_types(model)
    own = [value.reshape(-1) for name, value in diagonal.values.items() if types[name] == "Emb"]
    weighted = sum(v.numel() * float(v.mean()) for v in own) / sum(v.numel() for v in own)
    plain = float(torch.stack([v.mean() for v in own]).mean())
    detail = f"S(Emb) of Eq. 4 and the weighted mean; a table of 4 rows and one of 8, whose plain mean is {plain:.3g}"
    return agrees(sharpness(model, tokens)["Emb"], weighted, detail)


@claim("log-scale", "App. A.1, Sharpness Principle Experiments", "VAGUE", uses=[hessian_diagonal])
def log_scale(seed: int) -> Evidence:
    r"""'average sharpness values ... are calculated on a logarithmic scale, i.e., $\log h(\theta[\bullet])$'
    Correct: the logarithm of Eq. 4, or the mean of $\log h$, which is smaller, and minus infinity where a token of the
    vocabulary does not occur"""
    model, tokens = tiny_model(seed), Draw(seed).integers(0, 4, 2, 4)
    diagonal, types = hessian_diagonal(model, tokens, tokens, loss="cross_entropy", kind="ggn"), block_types(model)
    h = torch.cat([v.reshape(-1) for name, v in diagonal.values.items() if types[name] == "QK"])
    h = h[h > 0]
    return readings({"log of the mean": float(h.mean().log()), "mean of the log": float(h.log().mean())}, "QK, entries above 0")


@claim("ours/eq3-micro-batches", "Sharpness Disparity, Eq. 3", "HOLDS")
def micro_batches(seed: int) -> Evidence:
    r"""the mean of Eq. 3 over micro-batches, down to $\mathrm{diag}(\hat F)$ at one term each, is unbiased too and has a
    smaller total variance than Eq. 3 on the whole batch"""
    point = Classifier.draw(seed)
    weights, scores = point.independent(point.P), point.scores
    vectors = list(itertools.product(range(3), repeat=3))
    own = torch.stack([scores[range(3), list(v)] for v in vectors])  # 27 x B x #
    whole, single = 3 * own.mean(1).square(), own.square().mean(1)
    mean = (weights[:, None] * single).sum(0)
    variances = [float((weights[:, None] * (h - point.fisher).square()).sum()) for h in (single, whole)]
    ratio = variances[0] / variances[1]
    error = relative_error(mean, point.fisher)
    return bounded(
        math.inf if error > 1e-10 else ratio, f"variances {variances[0]:.3g} and {variances[1]:.3g}, all label vectors"
    )
