"""What the tests of the sharpness estimator share: small models, all label vectors, scores written out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer
from hessiankit.training.partition import Part
from hessiankit.training.sharpness import Replicates, replicate

CLASSES = 3


def tiny(vocab: int = CLASSES, layers: int = 1, **options) -> Transformer:
    """A language model with a handful of parameters, at a generic point."""
    given = {"seed": 0, "max_len": 4, "causal": True, "n_heads": 1, "placement": "pre", **options}
    model = Transformer(vocab, d_model=4, d_ff=5, n_layers=layers, **given).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def tokens(*shape: int, vocab: int = CLASSES, seed: int = 1) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def vectors(positions: int, classes: int = CLASSES) -> Tensor:
    """All label vectors, (classes^positions, positions)."""
    return torch.tensor(list(itertools.product(range(classes), repeat=positions)))


def everything(logits: Tensor, counted: Tensor, power: float = 1.0) -> tuple[Callable[..., Tensor], Tensor, int]:
    """Return a sampler whose draws are all label vectors of the counted positions, their probabilities, and how many there are.

    ``power`` is one over the temperature of the labels' distribution.
    """
    found = vectors(int(counted.sum()), logits.shape[-1])
    p = torch.log_softmax(power * logits.detach(), -1)[counted]  # (positions, classes)
    probabilities = p.gather(1, found.T).sum(0).exp()
    whole = torch.zeros(len(found), *counted.shape, dtype=torch.int64)
    whole[:, counted] = found
    return by_number(whole), probabilities, len(found)


def by_number(whole: Tensor) -> Callable[..., Tensor]:
    """Return a sampler that looks labels (draws, sequences, positions) up by the number of the sequence."""
    return lambda logits, numbers, draws, seed: whole[:draws, list(numbers)]


@contextmanager
def drawn_by(sampler: Callable[..., Tensor]) -> Iterator[None]:
    """Draw labels, or the residuals of squared error, by a function of (output, numbers of the sequences, draws, seed)."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sample_labels", "sample_residuals"):
            patch.setattr(replicate, name, sampler)
        yield


def expectation(found: Replicates, probabilities: Tensor) -> Tensor:
    """Return the mean over the draws of the traces, (parts,), micro-batches weighted by their terms."""
    weights = found.terms.double() / found.terms.sum()
    return torch.einsum("k,d,kdp->p", weights, probabilities, found.values)


def squares(value: Tensor, model: nn.Module, parts: Sequence[Part]) -> Tensor:
    """Return the squared norm of the gradient of a number in each part, by autograd alone."""
    parameters = dict(model.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(value, list(parameters.values()), retain_graph=True), strict=True))
    return torch.stack([part.squared_norm(gradients[part.parameter]) for part in parts])


def expected_squares(model: nn.Module, x: Tensor, counted: Tensor, parts: tuple[Part, ...]) -> Tensor:
    """Return (1/N) sum_n E||grad -log p(y_n)||^2 for each part: one gradient for every position and class."""
    logs = torch.log_softmax(model(x), -1)[counted]  # (N, classes)
    return sum(log.detach().exp() * squares(log, model, parts) for row in logs for log in row) / len(logs)


def plain_parts(model: nn.Module, kind: str = "FFN") -> list[Part]:
    """One part for each parameter, all of one type."""
    return [Part(name, kind, "weight", None, "given", p.numel()) for name, p in model.named_parameters()]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
