"""A primitive for one operation that has no chapter: its actions come from automatic differentiation of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.primitive import Covectors, Inputs, Primitive, Tangents
from hessiankit.errors import TraceError


@dataclass(frozen=True, eq=False)
class AutomaticDifferentiation(Primitive):
    """An operation known only by its value; second derivatives are taken as jvp(grad), the route that is right.

    ``function`` takes the differentiable inputs, in order. ``name`` is what the result reports.
    """

    function: Callable[..., Tensor]
    name: str

    def value(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        moving, run = self._moving(inputs, tangents)
        primals = tuple(inputs[i] for i in moving)
        directions = tuple(t for t in tangents if t is not None)
        with self._named():
            return torch.vmap(lambda *t: torch.func.jvp(run, primals, t)[1])(*directions)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        with self._named():
            pull = torch.func.vjp(self.function, *inputs)[1]
            return tuple(torch.vmap(pull)(adjoint))

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        moving, _ = self._moving(inputs, tangents)

        def gradient(*moved: Tensor) -> tuple[Tensor, ...]:
            full = list(inputs)
            for i, x in zip(moving, moved, strict=True):
                full[i] = x
            return torch.func.grad(lambda *x: (adjoint * self.function(*x)).sum(), argnums=tuple(range(len(full))))(*full)

        primals = tuple(inputs[i] for i in moving)
        directions = tuple(t for t in tangents if t is not None)
        with self._named():
            return tuple(torch.vmap(lambda *t: torch.func.jvp(gradient, primals, t)[1])(*directions))

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise TraceError(
                f"{self.name} has no closed form here, and torch cannot differentiate it twice: {str(error).split(chr(10))[0]}. "
                "Write it in other operations, or take out the parameters before it with params=[...]"
            ) from error

    def _moving(self, inputs: Inputs, tangents: Tangents) -> tuple[Sequence[int], Callable[..., Tensor]]:
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def run(*moved: Tensor) -> Tensor:
            full = list(inputs)
            for i, x in zip(moving, moved, strict=True):
                full[i] = x
            return self.function(*full)

        return moving, run
