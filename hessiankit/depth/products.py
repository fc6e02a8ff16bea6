"""Products with the diagonal blocks of the Hessian or Gauss-Newton matrix of a model of any size, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hessiankit.depth.data import Data
from hessiankit.estimation.batches import MicroBatch

Pieces = tuple[Tensor, ...]


class BlockProducts:
    """Products with H_ll for every layer l, of the mean loss over all data.

    The Hessian's are reverse over reverse, H v = d/dtheta <g, v>. The Gauss-Newton part's are J^T (L'' (J v)), with J v as the
    derivative of J^T u in u. The graph of one micro-batch is kept; with several, each product makes all of them anew.

    Args:
        data: The data.
        blocks: The parameters of each block, which require gradients.
        kind: ``"hessian"`` or ``"ggn"``.
    """

    def __init__(self, data: Data, blocks: Sequence[dict[str, nn.Parameter]], kind: str) -> None:
        self.data, self.kind = data, kind
        self.blocks = [list(block.values()) for block in blocks]
        self.everything = list({id(p): p for block in self.blocks for p in block}.values())
        self.terms = sum(data.counts())
        self.kept = self._graph(data.batches[0]) if len(data.batches) == 1 else None

    def of(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return the function v (P_l,) -> H_ll v, l from 0."""
        parameters = self.blocks[k]

        def product(v: Tensor) -> Tensor:
            pieces = tuple(part.view_as(p) for part, p in zip(v.split([p.numel() for p in parameters]), parameters, strict=True))
            total = torch.zeros_like(v)
            for batch in self.data.batches:
                graph = self.kept if self.kept is not None else self._graph(batch)
                found = graph.product(parameters, pieces)
                total += torch.cat([x.reshape(-1) for x in found]).detach()
            return total / self.terms

        return product

    def _graph(self, batch: MicroBatch) -> _Hessian | _GaussNewton:
        out = self.data.output(batch)
        target = self.data.target(batch, out)
        if self.kind == "hessian":
            return _Hessian(self.data.summed_loss(out, target), self.everything)
        return _GaussNewton(out, lambda z: self.data.summed_loss(z, target))


class _Hessian:
    def __init__(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        self.gradients = {id(p): g for p, g in zip(parameters, gradients, strict=True)}

    def product(self, parameters: list[nn.Parameter], v: Pieces) -> Pieces:
        slopes = [
            (g, x) for p, x in zip(parameters, v, strict=True) if (g := self.gradients[id(p)]) is not None and g.requires_grad
        ]
        if not slopes:
            return tuple(map(torch.zeros_like, v))
        outputs, directions = zip(*slopes, strict=True)
        return _grad(outputs, parameters, directions)


class _GaussNewton:
    def __init__(self, out: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        self.out = out
        self.z = out.detach().requires_grad_()
        (self.slope,) = torch.autograd.grad(loss(self.z), self.z, create_graph=True)

    def product(self, parameters: list[nn.Parameter], v: Pieces) -> Pieces:
        u = torch.zeros_like(self.out, requires_grad=True)
        back = torch.autograd.grad(self.out, parameters, u, create_graph=True, retain_graph=True, allow_unused=True)
        pairs = [(b, x) for b, x in zip(back, v, strict=True) if b is not None]
        if not pairs:
            return tuple(map(torch.zeros_like, v))
        outputs, directions = zip(*pairs, strict=True)
        (Jv,) = torch.autograd.grad(outputs, u, directions)
        (curved,) = torch.autograd.grad(self.slope, self.z, Jv, retain_graph=True)
        return _grad((self.out,), parameters, (curved,))


def _grad(outputs: Sequence[Tensor], parameters: list[nn.Parameter], directions: Sequence[Tensor]) -> Pieces:
    found = torch.autograd.grad(outputs, parameters, directions, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True))
