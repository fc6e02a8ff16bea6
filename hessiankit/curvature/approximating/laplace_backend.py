"""Curvature for laplace-torch: full, diagonal and Kronecker-factored Gauss-Newton matrices by closed forms.

Only ``HessiankitGGN``, made at its first use, needs laplace-torch: ``Laplace(model, "classification", backend=HessiankitGGN)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.curvature.kronecker import KroneckerFactors
from hessiankit.curvature.operator import hessian_operator
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.read import read_request
from hessiankit.support.errors import InputError

WHO = "HessiankitGGN"


class GaussNewtonBackend:
    """A backend of laplace-torch, for all weights or those of the last layer; in KFAC, weights and biases have separate factors.

    Raises:
        InputError: Weights are asked for as a subnetwork, labels as drawn, or a matrix has no Kronecker factors.
    """

    def _options(self: Any, **unknown: Any) -> dict[str, Any]:
        unknown.pop("N", None)
        if unknown or self.stochastic or self.subnetwork_indices is not None:
            raise InputError(f"{WHO}: has no subnetworks, drawn labels or {sorted(unknown)}; take laplace-torch's own backend")
        loss = "mse" if self.likelihood == "regression" else "cross_entropy"
        return {"loss": loss, "params": self.params, "kind": "ggn", "reduction": "sum"}

    def _scaled(self: Any, loss: float, matrix: Any) -> tuple[Tensor, Any]:
        return self.factor * self.params[0].new_tensor(loss), self.factor * matrix

    def full(self: Any, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and the Gauss-Newton matrix, (P, P)."""
        operator = hessian_operator(self.model, _inputs(x), y, **self._options(**kwargs))
        return self._scaled(operator.loss, operator.to_matrix())  # type: ignore[no-any-return]

    def diag(self: Any, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and the exact diagonal of the Gauss-Newton matrix, (P,)."""
        diagonal = hessian_diagonal(self.model, _inputs(x), y, **self._options(**kwargs))
        return self._scaled(diagonal.loss, diagonal.flat)  # type: ignore[no-any-return]

    def kron(self: Any, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the loss and KFAC of one batch of M among N samples; vectors without factors, as the gains of norms, have their
        exact diagonal.

        laplace-torch adds the first factors of the batches, the second ones and the single ones, each kind for itself; of data
        that are fitted later it discounts the second factors. So the second factor is the batch's share M / N of a mean over
        samples, and what has no second factor is a sum: batches of any sizes add up to KFAC of all N. The samples need equal
        numbers of rows that count, so that a mean over rows is one over samples.
        """
        from laplace.utils import Kron  # only here: laplace-torch

        options = self._options(**kwargs)
        if len(y) < N and options["loss"] == "cross_entropy" and bool((y == IGNORE_INDEX).any()):
            raise InputError(
                f"{WHO}: a batch has labels of {IGNORE_INDEX}, which count among its samples; leave these samples out"
            )
        batches = read_request(self.model, _inputs(x), y, **options).together()
        factors = {w.parameter: w for w in KroneckerFactors(batches).weights if w.at is None}
        unfactored = {name: p for name, p in batches[0].parameters.items() if name not in factors}
        if unsupported := [name for name, p in unfactored.items() if p.ndim != 1]:
            raise InputError(f"{WHO}: {unsupported[0]!r} has no Kronecker factors; freeze it, or take hessian_structure='diag'")
        rest = (
            hessian_diagonal(self.model, _inputs(x), y, **{**self._options(), "params": list(unfactored)}).values
            if unfactored
            else {}
        )
        blocks = []
        for name in batches[0].parameters:
            w = factors.get(name)
            if w is not None and not w.is_even and len(y) < N:
                raise InputError(
                    f"{WHO}: the input of {name!r} has rows that count in some samples of a batch only; pass all {N} samples as "
                    "one batch, or take hessian_structure='diag'"
                )
            if w is None or w.inputs is None:
                blocks.append([torch.diag(rest[name]) if w is None else w.gradients])
            elif w.transposed:
                blocks.append([w.gradients, len(y) / N * w.moment])
            else:
                blocks.append([len(y) * w.moment, w.gradients / N])
        return self._scaled(batches[0].share * batches[0].reference.loss, Kron(blocks))  # type: ignore[union-attr, no-any-return]


def _inputs(x: Any) -> Any:
    return (x,) if isinstance(x, Mapping) else x


def __getattr__(name: str) -> Any:
    if name != WHO:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from laplace.curvature import GGNInterface  # only here: laplace-torch

    globals()[name] = type(name, (GaussNewtonBackend, GGNInterface), {"__module__": __name__})
    return globals()[name]
