"""References that call another package's Hessian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.verify.problem import IGNORED_LABEL, Problem, differentiable_attention, outputs_of
from hessiankit.verify.references.base import FAILURES, Progress, Reference, Unsupported, in_chunks


class Curvlinops(Reference):
    """``curvlinops.HessianLinearOperator`` on the module with torch's own loss of the same name, reduction "mean".

    It exchanges the parameters by name (``functional_call``). The whole batch is handed over as one, so that the package's
    weighting of batches plays no part.
    """

    name = "curvlinops"
    independent_group = "jacfwd(jacrev)"
    summary = "curvlinops.HessianLinearOperator"

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        try:
            from curvlinops import HessianLinearOperator
        except ImportError as error:
            raise Unsupported(self.name, "the package is not installed (docs/howto/install.md says how)") from error
        losses = {"mse": nn.MSELoss(), "cross_entropy": nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)}
        if not isinstance(problem.loss, str) or problem.target is None:
            raise Unsupported(self.name, "it takes 'mse' and 'cross_entropy' only, not a loss of one's own")
        known = dict(problem.module.named_parameters())
        if buffers := [name for name in problem.params if name not in known]:
            raise Unsupported(self.name, f"it differentiates parameters only; {', '.join(buffers)} is a buffer")

        target = problem.target.reshape(-1) if problem.loss == "cross_entropy" else problem.target
        try:
            with problem.borrowed(), differentiable_attention():
                operator = HessianLinearOperator(
                    _OneBatch(problem.module, problem.loss),
                    losses[problem.loss],
                    list(problem.own.values()),
                    [({"inputs": problem.inputs}, target)],
                    check_deterministic=False,
                    batch_size_fn=lambda batch: 1,
                )
                gradient, loss = operator.gradient_and_loss()
                flat = torch.cat([g.detach().reshape(-1) for g in gradient])
                # Its products exchange the parameters by name, its gradient does not.
                if fault := problem.difference("the package", float(loss.detach()), flat) or problem.swap_fault:
                    raise Unsupported(self.name, fault)

                def multiply(rows: Tensor) -> Tensor:
                    return (operator @ rows.T).T

                value, note = in_chunks(multiply, lambda row: multiply(row[None])[0], V, chunk, progress)
        except FAILURES as error:
            raise self.unsupported(error) from error
        return value, None, note


class _OneBatch(nn.Module):
    """The module behind the one-argument call that the package makes, with the outputs in the loss's layout."""

    def __init__(self, module: nn.Module, loss: str) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the outputs; logits as rows (N, C)."""
        outputs = outputs_of(self.module, batch["inputs"], self.loss)
        return outputs.reshape(-1, outputs.shape[-1]) if self.loss == "cross_entropy" else outputs
