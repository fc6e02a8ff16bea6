r"""Curvature along the step that an optimizer takes next, and how far that step can be stretched.

Along a step d from theta, with gradient g and Hessian H of the loss L,

    directional sharpness = <d, H d> / |d|^2,    critical sharpness = 2 / (lr c),    L(theta + c d) = L(theta).

Where the gradient of a quadratic is an eigenvector of its Hessian, both are the eigenvalue for descent. Kalra et al., "A
scalable measure of loss landscape curvature for analyzing the training dynamics of LLMs", 2026 (arXiv 2601.16979), which finds c
by fewer than ten forward passes.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hessiankit.curvature.operator import HessianOperator
from hessiankit.curvature.suboperators import Partition, groups_of
from hessiankit.landscape.optimizer_states import Optimizers, listed, name_of, places_of
from hessiankit.landscape.slices import loss_around
from hessiankit.request.read import read_request
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.support.torch_state import one_at_a_time, preserved_random_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "critical_sharpness"
PASSES = 10
FIRST_FACTOR, RESOLUTION = 1.3, 1.01  # quotients of two multiples: the first and the second; those at which the search ends


@dataclass(frozen=True, repr=False, eq=False)
class CriticalSharpness(Printed, WithDict):
    """Curvature along an optimizer's next step d; made by :func:`hessiankit.critical_sharpness`.

    Attributes:
        optimizer: The class of the optimizer, or of each of several.
        lr: Largest learning rate of the optimizer.
        loss: L(theta).
        length: |d|.
        slope: <g, d>.
        curvature: The directional sharpness <d, H d> / |d|^2.
        multiple: The largest multiple of d tested below the first one that raises the loss; 0 where the slope is positive.
        raising: The smallest multiple tested that raises the loss; infinity where none did.
        passes: Forward passes taken, that at theta included.
        seconds: Time taken.
        groups: Result with one group of parameters moved alone, by the group's name.
    """

    optimizer: str
    lr: float
    loss: float
    length: float
    slope: float
    curvature: float
    multiple: float
    raising: float
    passes: int
    seconds: float = 0.0
    groups: dict[str, CriticalSharpness] = field(default_factory=dict)

    _derived = ("sharpness", "interval")

    @property
    def sharpness(self) -> float:
        """The critical sharpness 2 / (lr multiple); above 2 / lr the next step raises the loss."""
        return _over(2.0, self.lr * self.multiple)

    @property
    def interval(self) -> tuple[float, float]:
        """The critical sharpness of the multiples between which the loss crosses its value at theta."""
        return _over(2.0, self.lr * self.raising), self.sharpness

    def _headline(self) -> str:
        step = f"next step of {self.optimizer}, lr {self.lr:g}, from a loss of {self.loss:.6g}"
        end = "" if math.isfinite(self.raising) else ", the largest tried,"
        return f"{step}: the loss does not rise up to {self.multiple:.4g}{end} times it, {self.seconds:.2f} s"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        rows = [
            (name, f"{x.length:.4g}", f"{x.slope:.4g}", f"{x.curvature:.4g}", f"{x.multiple:.4g}", f"{x.sharpness:.4g}")
            for name, x in {"the step": self, **self.groups}.items()
        ]
        headers = ("moved", "length", "slope", "directional sharpness", "multiple", "critical sharpness")
        yield table(headers, rows, names=self.groups)


def _over(a: float, b: float) -> float:
    return a / b if b else math.inf


@checked(WHO, leave=("module",))
@one_at_a_time
@asks(RequestArguments)
def critical_sharpness(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    by: str | Mapping[str, Any] | Partition | None = None,
    passes: int = PASSES,
    **asked: Unpack[RequestArguments],
) -> CriticalSharpness:
    """Return the curvature along the step that an optimizer takes next, and its largest multiple that does not raise the loss.

    The optimizer takes the step itself, on copies of parameters and state, with the gradient of the loss on these data: any
    optimizer of torch's interface whose ``step`` needs no closure. Neither it nor the module changes; hooks of this optimizer
    are not run. The multiple is searched from that of the quadratic model, -2 <g, d> / <d, H d> (from 1 if that is not
    positive): raised by 1.3 and then by 2 until the loss rises, or lowered until it does not; then the bracket is bisected in
    the logarithm, until its ends differ by 1 % or the passes run out. A loss that falls again at larger steps is not noticed.

    Only the parameters ``params`` are moved.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: Inputs of the call.
        target: Target of the loss.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.
        optimizer: The optimizer that trains the module, or several, each for parameters of its own.
        by: Groups to move alone as well, as in :func:`hessiankit.spectrum`; each takes a product and as many passes again.
        passes: Forward passes at most, that at the module's parameters included; 2 or more.

    Raises:
        InputError: An argument cannot be used, or the optimizer takes no step or one that is not finite.
        TraceError: If torch cannot trace the module.

    Descent on w^2 with rate 1/4 moves w by -w/2, and the loss is the same at -w, after 4 such steps:

    >>> layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> descent = torch.optim.SGD(layer.parameters(), lr=0.25)
    >>> found = critical_sharpness(layer, one, 0 * one, optimizer=descent)
    >>> round(found.curvature, 9), round(found.multiple, 2), round(found.sharpness, 2), found.optimizer
    (2.0, 4.0, 2.0, 'SGD')
    """
    start = time.perf_counter()
    batches = read_request(module, inputs, target, **asked).together()
    operator = HessianOperator.of(batches, "hessian")
    groups = {} if by is None else groups_of(WHO, by, operator, module)
    parameters = {name: module.get_parameter(name) for name in operator.slices}
    with preserved_random_states(module):
        loss_at = loss_around(batches)
        search = along_step(WHO, optimizer, parameters, operator.gradient, operator.__matmul__, loss_at, groups, passes)
    return replace(search, seconds=time.perf_counter() - start)


def along_step(
    caller: str,
    optimizer: Optimizers,
    parameters: Mapping[str, Tensor],
    gradient: Tensor,
    product: Callable[[Tensor], Tensor],
    loss_at: Callable[[Tensor], float],
    groups: Mapping[str, Tensor],
    passes: int,
) -> CriticalSharpness:
    """Return the curvature along an optimizer's next step.

    The ``parameters`` are the optimizer's own, in the order of the entries of ``gradient`` (P,); ``product`` is v (P,) -> H v;
    ``loss_at`` takes a displacement (P,) in float64; ``groups`` are entries that are moved alone as well.
    """
    if passes < 2:
        raise InputError(f"{caller}: passes={passes}; the loss at the parameters and at one step take 2")
    optimizers = listed(caller, optimizer)
    name, step = name_of(optimizers), next_steps(caller, optimizers, parameters, gradient)
    if not bool(step.any()) or not bool(torch.isfinite(step).all()):
        kind = "zero" if not bool(step.any()) else "NaN or infinite"
        raise InputError(f"{caller}: the next step of {name} is {kind}; pass its own parameters and data with a finite gradient")
    lr = max(float(group.get("lr", math.nan)) for member in optimizers for group in member.param_groups)
    wide = torch.float32 if step.device.type == "mps" else torch.float64
    loss = loss_at(torch.zeros_like(step, dtype=wide))
    if not math.isfinite(loss):
        raise InputError(f"{caller}: the loss is {loss}; nothing is above or below it")

    def sharpness_along(d: Tensor) -> CriticalSharpness:
        slope, square = float(gradient.to(wide) @ d.to(wide)), float(d.to(wide).square().sum())
        bend = float(d.to(wide) @ product(d).to(wide)) if square else math.nan
        first = -2 * slope / bend if bend > 0 else 1.0
        ends = bracket(lambda t: loss_at(t * d.to(wide)) <= loss, first, passes - 1) if slope < 0 else (0.0, 0.0, 0)
        curvature = bend / square if square else math.nan
        return CriticalSharpness(name, lr, loss, square**0.5, slope, curvature, ends[0], ends[1], 1 + ends[2])

    positions = {name: at.to(step.device) for name, at in groups.items()}
    by_group = {name: sharpness_along(torch.zeros_like(step).index_copy(0, at, step[at])) for name, at in positions.items()}
    return replace(sharpness_along(step), groups=by_group)


def bracket(holds: Callable[[float], bool], t: float, limit: int) -> tuple[float, float, int]:
    """Return the largest multiple at which something holds below the smallest at which it does not, and the tests taken.

    0 and infinity without one. The first multiple tested is t, the second is larger or smaller by FIRST_FACTOR, further ones by
    2; there are ``limit`` tests at most.

    >>> low, high, taken = bracket(lambda t: t <= 3.0, 2.5, 9)
    >>> low <= 3.0 < high <= 1.01 * low, taken
    (True, 7)
    """
    low, high, tests = 0.0, math.inf, 0
    while tests < limit and high > RESOLUTION * low:
        tests += 1
        low, high = (t, high) if holds(t) else (low, t)
        factor = FIRST_FACTOR if tests == 1 else 2.0
        t = factor * low if math.isinf(high) else high / factor if not low else math.sqrt(low * high)
    return low, high, tests


def next_steps(caller: str, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
    """Return by how much optimizers would move the parameters that each holds; as :func:`next_step`."""
    if len(optimizers) > 1:  # what one optimizer does not hold stays where it is
        places_of(caller, optimizers, parameters)
    return torch.stack([next_step(caller, optimizer, parameters, gradient) for optimizer in optimizers]).sum(0)


@torch.no_grad()
def next_step(caller: str, optimizer: Optimizer, parameters: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
    """Return by how much an optimizer would move some parameters with a gradient (P,); neither it nor they change.

    Copies of the parameters take the step, by a copy of the optimizer with its state.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    >>> next_step("example", optimizer, dict(layer.named_parameters()), torch.tensor([1.0, 2.0]))
    tensor([-0.5000, -1.0000])
    """
    kind = type(optimizer)
    closure = inspect.signature(inspect.unwrap(kind.step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{caller}: the step of {kind.__name__} needs a closure, which evaluates the loss itself; pass another optimizer"
        )
    memo: dict[int, Any] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        memo[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    rows = gradient.split([p.numel() for p in parameters.values()])
    for p, slope in zip(parameters.values(), rows, strict=True):
        if id(p) in memo:
            memo[id(p)].grad = slope.reshape(p.shape).to(p.dtype)
    twin = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, which would move the optimizer itself
            vars(twin)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    starts = {id(p): p.detach().clone() for p in parameters.values()}
    try:
        twin.step()
    except Exception as error:
        raise InputError(f"{caller}: a step of a copy of {kind.__name__} failed: {type(error).__name__}: {error}") from error
    steps = [memo[id(p)].detach() - starts[id(p)] if id(p) in memo else torch.zeros_like(p) for p in parameters.values()]
    return torch.cat([step.reshape(-1) for step in steps]).to(gradient)
