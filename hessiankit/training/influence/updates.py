"""Steps of torch's SGD, Adam and AdamW as functions of parameters, gradient and state, entry by entry.

A step maps (theta, g, s) to (theta', s'). No entry depends on another, so that every Jacobian is diagonal: autograd of a sum
returns the diagonal, and an adjoint of theta' and s' is pulled back by products with a few vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hessiankit.support.errors import InputError

Values: TypeAlias = dict[str, Tensor]
Settings: TypeAlias = Mapping[str, Any]
THETA, GRADIENT, COUNT = "theta", "gradient", "step"


def sgd(x: Values, settings: Settings) -> Values:
    """Descent with weight decay and momentum; the first buffer is the gradient itself."""
    g, momentum = x[GRADIENT] + settings["weight_decay"] * x[THETA], settings["momentum"]
    buffer = torch.where(x[COUNT] == 0, g, momentum * x["momentum_buffer"] + (1 - settings["dampening"]) * g)
    step = g + momentum * buffer if settings["nesterov"] else buffer
    has_momentum = torch.as_tensor(momentum, device=g.device) != 0
    return {THETA: x[THETA] - settings["lr"] * torch.where(has_momentum, step, g), "momentum_buffer": buffer}


def adam(x: Values, settings: Settings) -> Values:
    """Adam with its two bias corrections; weight decay is that of the loss, or ``decoupled`` as in AdamW."""
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


def stepped(rule: Rule, x: Values, settings: Settings, moves: Tensor) -> Values:
    """Return theta', s' and the counts of steps; entries that do not ``move``, without a gradient, keep theirs."""
    new = rule.step(x, settings)
    return {name: torch.where(moves, value, x[name]) for name, value in new.items()} | {COUNT: x[COUNT] + moves}


def pulled(rule: Rule, x: Values, settings: Settings, moves: Tensor, adjoints: Values) -> Values:
    """Pull adjoints (S, P) of theta' and s' back to theta, s and the gradient."""
    leaves = {name: value.detach().requires_grad_() for name, value in x.items() if name != COUNT}
    with torch.enable_grad():
        new = stepped(rule, {**leaves, COUNT: x[COUNT]}, settings, moves)
    result = {name: torch.zeros_like(adjoints[THETA]) for name in leaves}
    for name, adjoint in adjoints.items():
        diagonals = torch.autograd.grad(new[name].sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
        for source, diagonal in zip(leaves, diagonals, strict=True):
            if diagonal is not None:
                result[source] += adjoint * diagonal
    return result
