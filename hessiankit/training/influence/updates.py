"""Steps of torch's SGD, Adam and AdamW as functions of parameters, gradient and state, entry by entry.

A step maps (theta, g, s) to (theta', s'). No entry depends on another, so that every Jacobian is diagonal: autograd of a sum
returns the diagonal, and an adjoint of theta' and s' is pulled back by products with a few vectors, some entries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessiankit.support.errors import InputError

Values: TypeAlias = dict[str, Tensor]
Settings: TypeAlias = Mapping[str, Any]
THETA, GRADIENT, COUNT = "theta", "gradient", "step"
ENTRIES = 2**18
"""Entries of vectors that a step moves together: ten vectors of them, with their derivatives, fit into a cache."""


def sgd(x: Values, settings: Settings) -> Values:
    """Descent with weight decay and momentum; the first buffer is the gradient itself."""
    g, momentum = x[GRADIENT] + settings["weight_decay"] * x[THETA], settings["momentum"]
    buffer = torch.where(x[COUNT] == 0, g, momentum * x["momentum_buffer"] + (1 - settings["dampening"]) * g)
    step = g + momentum * buffer if settings["nesterov"] else buffer
    return {THETA: x[THETA] - settings["lr"] * (step if momentum else g), "momentum_buffer": buffer}


def adam(x: Values, settings: Settings) -> Values:
    """Adam with its two bias corrections; weight decay enters the gradient, or is ``decoupled`` as in AdamW."""
    theta, g, t = x[THETA], x[GRADIENT], x[COUNT] + 1
    decay, beta1, beta2 = settings["weight_decay"], settings["beta1"], settings["beta2"]
    if settings["decoupled_weight_decay"]:
        theta = theta * (1 - settings["lr"] * decay)
    else:
        g = g + decay * theta
    m = beta1 * x["exp_avg"] + (1 - beta1) * g
    v = beta2 * x["exp_avg_sq"] + (1 - beta2) * g.square()
    is_zero = v == 0  # the root has no derivative there; g has been zero throughout, and so is m
    root = torch.where(is_zero, 1.0, v).sqrt() / (1 - beta2**t).sqrt()
    root = torch.where(is_zero, 0.0, root)
    return {THETA: theta - settings["lr"] / (1 - beta1**t) * m / (root + settings["eps"]), "exp_avg": m, "exp_avg_sq": v}


class Rule(NamedTuple):
    """The step of an optimizer, the names of its state, and the settings that it reads."""

    step: Callable[[Values, Settings], Values]
    state: tuple[str, ...]
    settings: tuple[str, ...]


SGD_RULE = Rule(sgd, ("momentum_buffer",), ("lr", "momentum", "dampening", "nesterov", "weight_decay"))
ADAM_RULE = Rule(adam, ("exp_avg", "exp_avg_sq"), ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay"))
RULES: dict[type[Optimizer], Rule] = {SGD: SGD_RULE, Adam: ADAM_RULE, AdamW: ADAM_RULE}


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer.

    Raises:
        InputError: There is none, or it has an option that the rule does not know.
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        names = ", ".join(kind.__name__ for kind in RULES)
        raise InputError(f"RecordedRun: the optimizer is {type(optimizer).__name__}; expected one of {names}")
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise InputError(f"RecordedRun: the optimizer has {option}=True, which is not known here; pass {option}=False")
    return rule


def settings_of(optimizer: Optimizer, group: Mapping[str, Any], rule: Rule) -> dict[str, float]:
    """Return the settings of a group of parameters as numbers."""
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    known = {"decoupled_weight_decay": isinstance(optimizer, AdamW), **group, **betas}  # in the group since torch 2.7
    return {name: float(known[name]) for name in rule.settings}


class Update(NamedTuple):
    """One step of an optimizer on all parameters.

    Attributes:
        rule: The rule.
        settings: Settings of each parameter.
        moves: Whether each parameter has a gradient; one without keeps its entries and state.
        sizes: Number of entries of each parameter.
    """

    rule: Rule
    settings: Sequence[Settings]
    moves: Sequence[bool]
    sizes: Sequence[int]

    def applied(self, x: Values) -> Values:
        """Return theta', s' and the counts of steps; x has vectors (P,), and one count for each parameter."""
        result = {name: x[name].clone() for name in (THETA, *self.rule.state)}
        for k, rows in self._pieces():
            for name, value in self.rule.step(self._piece(x, k, rows), self.settings[k]).items():
                result[name][rows] = value
        return {**result, COUNT: x[COUNT] + torch.tensor(self.moves, device=x[COUNT].device)}

    def pulled(self, x: Values, adjoints: Values) -> Tensor:
        """Pull adjoints (S, P) of theta' and s' back to theta and s, in place; return that of the gradient."""
        of_gradient = torch.zeros_like(adjoints[THETA])
        results = {**adjoints, GRADIENT: of_gradient}
        for k, rows in self._pieces():
            leaves = {name: value.detach().requires_grad_(name != COUNT) for name, value in self._piece(x, k, rows).items()}
            with torch.enable_grad():
                new = self.rule.step(leaves, self.settings[k])
            sources = [name for name in leaves if name != COUNT]
            totals = {name: torch.zeros_like(of_gradient[:, rows]) for name in sources}
            for name, adjoint in adjoints.items():
                inputs = [leaves[source] for source in sources]
                diagonals = torch.autograd.grad(new[name].sum(), inputs, retain_graph=True, allow_unused=True)
                for source, diagonal in zip(sources, diagonals, strict=True):
                    if diagonal is not None:
                        totals[source] += adjoint[:, rows] * diagonal
            for name, total in totals.items():
                results[name][:, rows] = total
        return of_gradient

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        """Yield positions of moving parameters, with some of the entries of each."""
        start = 0
        for k, size in enumerate(self.sizes):
            for first in range(start, start + size, ENTRIES) if self.moves[k] else ():
                yield k, slice(first, min(first + ENTRIES, start + size))
            start += size

    @staticmethod
    def _piece(x: Values, k: int, rows: slice) -> Values:
        return {name: value[k] if name == COUNT else value[rows] for name, value in x.items()}
