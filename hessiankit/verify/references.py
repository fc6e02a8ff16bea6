"""The registry of references for exact Hessians. A group shares a path, and with it the defects, so it counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell, silent
from hessiankit.verify.probes import Probes
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_automatic import curvlinops, forward_over_reverse, functional, reverse_over_reverse
from hessiankit.verify.reference_base import Outcome, Progress, Reference, Unsupported
from hessiankit.verify.reference_differences import central

__all__ = ["REFERENCES", "Outcome", "Progress", "Reference", "Unsupported", "run_references"]

_TABLE = (
    Reference("reverse-over-reverse", "reverse", reverse_over_reverse),
    Reference("jvp(grad)", "forward-over-reverse", forward_over_reverse),
    Reference("central-differences", "differences", central, many_calls=True),
    Reference("torch.func.hessian", "jacfwd(jacrev)", functional),
    Reference("curvlinops", "jacfwd(jacrev)", curvlinops),
)
REFERENCES: dict[str, Reference] = {reference.name: reference for reference in _TABLE}


def run_references(
    problem: Problem,
    V: Tensor | None = None,
    names: Iterable[str] | None = None,
    *,
    probes: Probes | None = None,
    progress: Tell = silent,
) -> dict[str, Outcome | Unsupported]:
    """Run references one after the other; one that does not exist for the problem returns its ``Unsupported``.

    Args:
        problem: The loss to differentiate.
        V: Directions (k, P); None for whole matrices.
        names: Keys of ``REFERENCES``; None for all of them.
        probes: Directions of their own for the routes that call the module many times a direction (central differences).
        progress: Function called with (reference, directions done, directions in all).

    Raises:
        InputError: An unknown name.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x, t = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    >>> results = run_references(Problem(layer, x, t), names=["jvp(grad)", "reverse-over-reverse"])
    >>> [outcome.value.tolist() for outcome in results.values()]  # 2 x x^T
    [[[2.0, 4.0], [4.0, 8.0]], [[2.0, 4.0], [4.0, 8.0]]]
    """
    results: dict[str, Outcome | Unsupported] = {}
    for name in REFERENCES if names is None else names:
        if name not in REFERENCES:
            raise InputError(f"run_references: no reference named '{name}'; choose from {', '.join(REFERENCES)}.")
        reference = REFERENCES[name]
        route_probes = probes if reference.many_calls else None
        try:
            outcome = reference.measure(problem, V if route_probes is None else route_probes.V, progress=partial(progress, name))
            results[name] = replace(outcome, probes=route_probes)
        except Unsupported as reason:
            results[name] = reason
    return results
