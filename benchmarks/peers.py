"""The other ways to a dense Hessian: torch's own routes, each as a user would write it.

A peer that works in chunks multiplies the Hessian with a few directions at a time; a whole peer returns all of it at
once and needs the memory for that. Some return something else than the Hessian through ``layer_norm`` with a gain:
they are measured all the same, compared, and marked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from benchmarks.problems import Case

Runner: TypeAlias = Callable[[Tensor], Tensor]
"""Directions, one a row (k, P), to their products with the Hessian, one a row (k, P)."""


class Peer(ABC):
    """One route. ``prepare`` does what is done once for all directions; it counts as the route's time."""

    name: str
    summary: str
    one_by_one = False
    """Whether it takes one direction at a time, so that there is no chunk to choose."""
    fixed = False
    """Whether every chunk has to have the same shape, because each shape is compiled."""

    def missing(self, case: Case) -> str:
        """Return why the route cannot be tried here; empty if it can."""
        return ""

    @abstractmethod
    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""


class Whole(ABC):
    """A route that returns the whole matrix at once."""

    name: str
    summary: str

    def missing(self, case: Case) -> str:
        """Return why the route cannot be tried here; empty if it can."""
        return ""

    @abstractmethod
    def matrix(self, case: Case) -> Tensor:
        """Return the P x P matrix."""


class ReverseOverReverse(Peer):
    """``torch.autograd.grad`` of the gradient, batched over directions."""

    name = "reverse over reverse"
    summary = "torch.autograd.grad twice, is_grads_batched"

    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""
        theta = case.theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(case.flat_loss(theta), theta, create_graph=True)
        return lambda V: torch.autograd.grad(gradient, theta, V, retain_graph=True, is_grads_batched=True)[0]


class VjpOfGrad(Peer):
    """``vmap`` of ``vjp`` of ``grad``."""

    name = "vmap(vjp(grad))"
    summary = "torch.func.vjp of torch.func.grad: reverse over reverse by transforms"

    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""
        pull = vjp(grad(case.flat_loss), case.theta)[1]
        return vmap(lambda v: pull(v)[0])


class JvpOfGrad(Peer):
    """``vmap`` of ``jvp`` of ``grad``."""

    name = "vmap(jvp(grad))"
    summary = "torch.func.jvp of torch.func.grad: forward over reverse"

    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""
        return lambda V: self.products(case, case.theta, V)

    @staticmethod
    def products(case: Case, theta: Tensor, V: Tensor) -> Tensor:
        """Return H V at theta, as a function of tensors only, which ``torch.compile`` can take."""
        return vmap(lambda v: jvp(grad(case.flat_loss), (theta,), (v,))[1])(V)


class JvpOfJacrev(Peer):
    """``jacfwd(jacrev)``, a chunk of columns at a time."""

    name = "jacfwd(jacrev)"
    summary = "torch.func.hessian's route in chunks: torch.func.jvp of torch.func.jacrev"

    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""
        return lambda V: self.products(case, case.theta, V)

    @staticmethod
    def products(case: Case, theta: Tensor, V: Tensor) -> Tensor:
        """Return the products at theta, as a function of tensors only."""
        return vmap(lambda v: jvp(jacrev(case.flat_loss), (theta,), (v,))[1])(V)


class FuncHessian(Whole):
    """``torch.func.hessian`` as it is."""

    name = "torch.func.hessian"
    summary = "torch.func.hessian: jacfwd(jacrev), all columns at once"

    def matrix(self, case: Case) -> Tensor:
        """Return the P x P matrix."""
        return torch.func.hessian(case.flat_loss)(case.theta)


class AutogradHessian(Whole):
    """``torch.autograd.functional.hessian`` as it is."""

    name = "autograd.functional.hessian"
    summary = "torch.autograd.functional.hessian(vectorize=True), all rows at once"

    def matrix(self, case: Case) -> Tensor:
        """Return the P x P matrix."""
        return torch.autograd.functional.hessian(case.flat_loss, case.theta, vectorize=True)  # type: ignore[return-value]


class Compiled(Peer):
    """Another peer under ``torch.compile``; compiling belongs to the warm-up and is not counted."""

    fixed = True

    def __init__(self, base: JvpOfGrad | JvpOfJacrev, case: Case, chunk: int) -> None:
        self.name, self.chunk = f"compiled {base.name}", chunk
        self.summary = f"torch.compile of {base.name}"
        self.run = torch.compile(lambda theta, V: base.products(case, theta, V), dynamic=False)

    def prepare(self, case: Case) -> Runner:
        """Return the function that multiplies directions with the Hessian."""
        return lambda V: self.run(case.theta, V)


def plain_columns(case: Case, columns: list[int]) -> Tensor:
    """Return some columns of the Hessian, one a row, by ``torch.autograd.grad`` twice, one direction at a time: the reference.

    No batching and no transform: the one route without known defects.
    """
    theta = case.theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(case.flat_loss(theta), theta, create_graph=True)
    return torch.stack([torch.autograd.grad(gradient[j], theta, retain_graph=True)[0] for j in columns])
