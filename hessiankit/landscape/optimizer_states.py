r"""The metrics of torch's optimizers, read from their states.

With its second moments frozen, an optimizer's step is preconditioned descent with momentum, theta <- theta - lr P^-1 m, P a
positive diagonal and m a sum of past gradients. On a quadratic model with Hessian H such steps diverge where an eigenvalue of
P^(-1/2) H P^(-1/2) exceeds the threshold 2 / (lr K), K the response of m to a gradient that changes its sign at every step:

    gradient descent             m = g                           K = 1                          2 / lr
    heavy ball, dampening d      m <- beta m + (1 - d) g         K = (1 - d) / (1 + beta)       2 (1 + beta) / ((1 - d) lr)
    Nesterov                     g + beta m of the heavy ball    K = (1 + 2 beta)/(1 + beta)    2 (1 + beta) / ((1 + 2 beta) lr)
    moving average (Adam)        d = beta                                                       (2 + 2 beta) / ((1 - beta) lr)

Cohen, Kaur, Li, Kolter and Talwalkar, "Gradient descent on neural networks typically occurs at the edge of stability", 2021,
Appendix B; Cohen et al., "Adaptive gradient methods at the edge of stability", 2022, Sec. 2, where Adam's P has the bias
correction of the first moment too. Where entries have different lr or K, the iteration on the quadratic model diverges where an
eigenvalue of D^(1/2) H D^(1/2) exceeds 1, D = diag(lr K / (2 P)): z = -1 is the only point of the unit circle, 1 aside, at which
z can be a root for a symmetric H without Nesterov's momentum, since the imaginary part of (1 - z) / K(z) has one sign.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop

from hessiankit.support.errors import InputError


class Metric(NamedTuple):
    """The diagonal P of one parameter, the factor K of its momentum, and the threshold 2 / (lr K) in words."""

    P: Tensor
    response: float
    threshold: str


Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"
"""An optimizer, or several of which each moves parameters of its own."""
Reader: TypeAlias = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Metric]
DESCENT, HEAVY_BALL = "2 / lr", "2 (1 + momentum) / ((1 - dampening) lr)"
NESTEROV, AVERAGE = "2 (1 + momentum) / ((1 + 2 momentum) lr)", "(2 + 2 beta1) / ((1 - beta1) lr)"


def sgd(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = 1."""
    one, beta = torch.ones_like(p), float(group["momentum"])
    if not beta:
        return Metric(one, 1.0, DESCENT)
    if group["nesterov"]:
        return Metric(one, (1 + 2 * beta) / (1 + beta), NESTEROV)
    return Metric(one, (1 - float(group["dampening"])) / (1 + beta), HEAVY_BALL)


def adam(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), with amsgrad of the largest v."""
    beta1, beta2 = map(float, group["betas"])
    t, v = float(state["step"]), state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    P = (1 - beta1**t) * ((v / (1 - beta2**t)).sqrt() + group["eps"])
    return Metric(P, (1 - beta1) / (1 + beta1), AVERAGE)


def adamax(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = (1 - beta1^t) u, u the largest decayed |g| + eps."""
    beta1 = float(group["betas"][0])
    return Metric((1 - beta1 ** float(state["step"])) * state["exp_inf"], (1 - beta1) / (1 + beta1), AVERAGE)


def rmsprop(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = sqrt(v) + eps, v less the square of the mean gradient where it is centered."""
    v, beta = state["square_avg"], float(group["momentum"])
    if group["centered"]:
        v = v - state["grad_avg"].square()
    threshold = HEAVY_BALL if beta else DESCENT
    return Metric(v.sqrt() + group["eps"], 1 / (1 + beta), threshold)


def adagrad(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = (1 + (t - 1) lr_decay) (sqrt(sum of squares) + eps)."""
    decay = 1 + (float(state["step"]) - 1) * group["lr_decay"]
    return Metric(decay * (state["sum"].sqrt() + group["eps"]), 1.0, DESCENT)


def adafactor(p: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Metric:
    """P = lr / alpha sqrt(v), v of rank one for matrices, alpha = max(eps2, rms(p)) min(lr, 1 / sqrt(t)) of the parameter now.

    Without the clipping of a step whose root mean square exceeds d: it depends on the next gradient, which no state holds, and
    only makes steps shorter.
    """
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
    if "variance" in state:
        v = state["variance"]
    else:
        rows, columns = state["row_var"], state["col_var"]
        v = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=eps1)
    lr, rms = float(group["lr"]), float(p.detach().norm()) / p.numel() ** 0.5
    alpha = max(eps2, rms) * min(lr, float(state["step"]) ** -0.5)
    return Metric((lr / alpha if lr else 1.0) * v.clamp(min=eps1**2).sqrt(), 1.0, DESCENT)


READERS: dict[type[Optimizer], Reader] = {
    SGD: sgd, Adam: adam, AdamW: adam, Adamax: adamax, RMSprop: rmsprop, Adagrad: adagrad, Adafactor: adafactor,
}  # fmt: skip


def waits(optimizers: Sequence[Optimizer], *, for_state: bool = True) -> str:
    """Return why optimizers have no step or metric now (the rate is 0, or one has taken no step), or "" if they have."""
    if not any(float(group.get("lr", 1.0)) for optimizer in optimizers for group in optimizer.param_groups):
        return "the learning rate is 0"
    for optimizer in optimizers if for_state else ():
        if not isinstance(optimizer, SGD) and not any(float(state.get("step", 0)) > 0 for state in optimizer.state.values()):
            return "the optimizer has taken no step"
    return ""


def listed(caller: str, optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple, each without the wrapper of Accelerate.

    Raises:
        InputError: There is none.
    """
    unwrapped = []
    for optimizer in (optimizers,) if isinstance(optimizers, Optimizer) else optimizers:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        unwrapped.append(optimizer)
    if not unwrapped:
        raise InputError(f"{caller}: the list of optimizers is empty; pass the optimizers that train the module")
    return tuple(unwrapped)


def name_of(optimizers: Sequence[Optimizer]) -> str:
    """Return the names of the classes of optimizers."""
    return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))


class GroupEntry(NamedTuple):
    """The optimizer that holds a parameter, its group of parameters there, and the number of the parameter in the group."""

    optimizer: Optimizer
    group: dict[str, Any]
    number: int


def places_of(caller: str, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> dict[str, GroupEntry]:
    """Return the entry of each parameter, by identity.

    Raises:
        InputError: Two optimizers hold a parameter, or none does.
    """
    places: dict[int, list[GroupEntry]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for k, p in enumerate(group["params"]):
                places.setdefault(id(p), []).append(GroupEntry(optimizer, group, k))
    names = name_of(optimizers)
    for name, p in parameters.items():
        count = len(places.get(id(p), ()))
        if count > 1:
            raise InputError(f"{caller}: {count} optimizers hold the parameter {name!r}; pass optimizers that share none")
        if not count:
            raise InputError(
                f"{caller}: {names} does not hold the parameter {name!r}; pass params=[...] with those that it moves"
            )
    return {name: places[id(p)][0] for name, p in parameters.items()}


def decay_note(decay: float, decoupled: bool) -> str:
    """Return what the eigenvalues do not contain of a weight decay."""
    if decoupled:
        return f"without the weight decay: every step also shrinks parameters by {decay:g} lr"
    return f"without the weight decay, which adds {decay:g} to the Hessian's diagonal"


def reader_of(caller: str, optimizer: Optimizer) -> Reader:
    """Return the reader of an optimizer's class or of its base class if it inherits ``step``."""
    kind = type(optimizer)
    for optimizer_class, reader in READERS.items():
        if isinstance(optimizer, optimizer_class) and inspect.unwrap(kind.step) is inspect.unwrap(optimizer_class.step):
            return reader
    raise InputError(
        f"{caller}: no metric is known for {kind.__name__}: its state holds no positive P, or none with a documented form. Pass "
        f"one of {', '.join(one.__name__ for one in READERS)} of torch, or P itself: diagonals by parameter, a function that "
        "returns them, or a positive operator"
    )
