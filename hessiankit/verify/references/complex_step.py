"""Differentiation along the imaginary axis: no subtraction, hence no cancellation and no step to tune."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from hessiankit.verify.problem import Problem
from hessiankit.verify.references.base import FAILURES, Progress, Reference, Unsupported

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class ComplexStep(Reference):
    """H v = Im g(theta + i h v) / h with h so small (1e-30 in float64) that the error h^2 is below rounding.

    It exchanges the parameters by name (``functional_call``), and needs a loss that extends holomorphically, in operations
    that torch has for complex numbers. Softmax, layer_norm, gelu and relu it has not; written out in exp, sqrt and division
    they work. An operation that is complex but not holomorphic (abs, var, conj) would give wrong numbers silently, so the
    first derivative is tested along a generic direction and along every direction asked for: Im f(theta + i h v) / h must
    equal <g, v>.

    Source: Squire and Trapp, Using complex variables to estimate derivatives of real functions, SIAM Review 40 (1998).
    """

    name = "complex-step"
    independent_group = "differences"
    summary = "the imaginary part of the gradient at theta + i h v"

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        if problem.dtype not in _COMPLEX:
            raise Unsupported(self.name, f"torch has no complex type of {problem.dtype}")
        try:
            fault = problem.swap_fault
        except FAILURES as error:
            raise self.unsupported(error) from error
        if fault:
            raise Unsupported(self.name, fault)
        h = 1e-30 if problem.dtype == torch.float64 else 1e-12
        slope = problem.flat_gradient()
        gradient = self._gradient(problem)

        def derivative(v: Tensor) -> Tensor:
            value, g = gradient(torch.complex(problem.theta, h * v))
            self._check_holomorphic(value.imag / h, slope, v)
            return g.imag / h

        generator = torch.Generator(device="cpu").manual_seed(0)
        generic = torch.randn(problem.size, generator=generator, dtype=torch.float64).to(problem.theta)
        try:
            with warnings.catch_warnings():
                # torch drops an imaginary part with a warning only; here that is the answer being lost.
                warnings.filterwarnings("error", message=".*discards the imaginary part.*")
                derivative(generic)
                products = []
                for v in V:
                    products.append(derivative(v))
                    progress(len(products), len(V))
        except (*FAILURES, UserWarning) as error:
            raise self.unsupported(error) from error
        return torch.stack(products) if products else torch.zeros_like(V), None, ""

    @staticmethod
    def _gradient(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the loss and its complex derivative at a complex point."""

        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            point = point.requires_grad_()
            loss = problem.flat_loss(point)
            if not loss.is_complex():
                raise RuntimeError("the loss of complex parameters is real, so an operation dropped the imaginary part")
            # torch returns the conjugate of the derivative of a holomorphic function.
            (g,) = torch.autograd.grad(loss, point, torch.ones_like(loss))
            return loss.detach(), g.conj()

        return evaluate

    def _check_holomorphic(self, along: Tensor, slope: Tensor, v: Tensor) -> None:
        scale = torch.dot(slope.abs(), v.abs())
        tolerance = 1e6 * torch.finfo(slope.dtype).eps * scale
        difference = (along - torch.dot(slope, v)).abs()
        if difference > tolerance:
            raise Unsupported(
                self.name,
                f"the loss is not holomorphic in this module's operations (its directional derivative is off by "
                f"{(difference / scale).item():.1e}); abs, var, std, norm and conj of a complex number are not",
            )
