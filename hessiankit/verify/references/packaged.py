"""References that call another package's Hessian."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.calling import arguments, read_outputs
from hessiankit.verify.problem import IGNORED_LABEL, Problem, differentiable_attention
from hessiankit.verify.references.base import Progress, Reference, Unsupported, in_chunks


class Curvlinops(Reference):
    """``curvlinops.HessianLinearOperator`` on the module with torch's own loss of the same name, reduction "mean".

    The whole batch is handed over as one, so that the package's weighting of batches plays no part.
    """

    name = "curvlinops"
    independent_group = "jacfwd(jacrev)"
    summary = "curvlinops.HessianLinearOperator"

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        try:
            from curvlinops import HessianLinearOperator
        except ImportError as error:
            raise Unsupported(self.name, "the package is not installed: pip install 'hessiankit[curvlinops]'") from error
        losses = {"mse": nn.MSELoss(), "cross_entropy": nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)}
        if not isinstance(problem.loss, str) or problem.target is None:
            raise Unsupported(self.name, "it takes 'mse' and 'cross_entropy' only, not a loss of one's own")
        known = dict(problem.module.named_parameters())
        if buffers := [name for name in problem.params if name not in known]:
            raise Unsupported(self.name, f"it differentiates parameters only; {', '.join(buffers)} is a buffer")

        model = _OneBatch(copy.deepcopy(problem.module), problem.loss)
        own = dict(model.module.named_parameters())
        with torch.no_grad():
            for name, value in problem.params.items():
                own[name].copy_(value).requires_grad_()
        target = problem.target.reshape(-1) if problem.loss == "cross_entropy" else problem.target
        operator = HessianLinearOperator(
            model,
            losses[problem.loss],
            [own[name] for name in problem.params],
            [({"inputs": problem.inputs}, target)],
            check_deterministic=False,
            batch_size_fn=lambda batch: 1,
        )

        def multiply(rows: Tensor) -> Tensor:
            with differentiable_attention():
                return (operator @ rows.T).T

        try:
            value, note = in_chunks(multiply, lambda row: multiply(row[None])[0], V, chunk, progress)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise self.unsupported(error) from error
        return value, None, note


class _OneBatch(nn.Module):
    """The module behind the one-argument call that the package makes, with the outputs in the loss's layout."""

    def __init__(self, module: nn.Module, loss: str) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the outputs; logits as rows (N, C)."""
        args, kwargs = arguments(batch["inputs"])
        outputs = read_outputs("curvlinops", self.loss, self.module(*args, **kwargs))
        return outputs.reshape(-1, outputs.shape[-1]) if self.loss == "cross_entropy" else outputs
