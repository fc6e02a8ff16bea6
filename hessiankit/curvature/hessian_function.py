"""The Hessian as a function of the parameters and the data, planned once and evaluated many times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.curvature.evaluation import Evaluation
from hessiankit.engine.assembly import assemble_chunks, check_matrix
from hessiankit.engine.block_terms import BlockTerms, block_terms
from hessiankit.engine.diagnosis import check_finite, without_effect
from hessiankit.engine.plan import ExecutionPlan, make_plan
from hessiankit.engine.problem.batches import batches, gather
from hessiankit.engine.problem.calling import arguments, map_tensors, named_leaves, named_tensors, one_kind
from hessiankit.engine.problem.handshake import ROUNDING, GenericSlope
from hessiankit.engine.problem.loss_trace import loss_trace, normalizer_of
from hessiankit.engine.problem.own_call import OwnGradient, called
from hessiankit.engine.problem.selection import Params, repeatable, select
from hessiankit.engine.problem.task import Loss, Task, available_memory
from hessiankit.engine.recorder import PlanError, recording, storage_key
from hessiankit.engine.replay import GuardError
from hessiankit.engine.storage import MatrixMemory, SymmetricStorage
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, TraceError
from hessiankit.support.tables import Piece, Printed
from hessiankit.support.torch_state import one_at_a_time, preserved_random_states
from hessiankit.tracing.source_line import first_line
from hessiankit.tracing.trace import Trace

WHO = "hessian_function"
SHARE = 0.25  # of the free memory that a plan may take
AGREE = 1e3  # times the rounding unit, relative to the largest entry: how close a plan has to come to the engine
PLAIN = (int, float, complex, str, bytes, torch.device, torch.Size)  # what is the same where it is equal
UNSEEN = "the module computes with something that a record of torch's operations does not show; use hessiankit.hessian for it"


class HessianFunction(Printed):
    """The Hessian of a module's loss at its present parameters, planned once; made by :func:`hessian_function`.

    Attributes:
        module: The module.
        plan: The operations that an evaluation runs; None where a plan does not pay, and every evaluation is :func:`hessian`.
        reason: Why there is no plan; empty where there is one.
        plans: How many plans have been made: another one where a decision, such as whether a softmax is saturated, comes out
            otherwise than before.
    """

    def __init__(self, module: nn.Module, inputs: Any, target: Any, loss: Loss, params: Params, batch_size: int | None) -> None:
        self.module, self.plan, self.reason, self.plans = module, None, "", 0
        self._data = (inputs, target)
        self._options: dict[str, Any] = {"loss": loss, "params": repeatable(params), "batch_size": batch_size}
        self._make(self._data)

    plan: ExecutionPlan | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy is made: planned anew, for a plan reads memory of its own."""
        return HessianFunction, (self.module, *self._data, *self._options.values())

    @checked(WHO)
    @one_at_a_time
    def __call__(self, inputs: Any = None, target: Any = None, *, out: Tensor | None = None) -> Hessian:
        """Return the Hessian at the parameters that the module has now.

        The loss is compared with that of the module's own forward. The first evaluation at other values than those of the plan
        is also made without it, and compared entry by entry.

        Args:
            inputs: Of the same shapes and dtypes as those of the plan; None: the last ones.
            target: Of the same shape and dtype; None: the last one.
            out: A (P, P) tensor that takes the matrix; None: a new one.

        Raises:
            InputError: A shape, a dtype, a mode, or a parameter is not that of the plan; or the result is not finite.
            TraceError: The module's own loss is another: it computes something else than when the plan was made.
        """
        data = (self._data[0] if inputs is None else inputs, self._data[1] if target is None else target)
        if self.plan is None and not self.reason:  # the last attempt to make one failed
            self._make(data)
        found = self._planned(data, out) if self.plan is not None else self._unplanned(data, out)
        self._data = data  # refused data are not the last ones
        return found

    def _planned(self, data: tuple[Any, Any], out: Tensor | None) -> Hessian:
        start = time.perf_counter()
        self._check_module()
        self._take(data)
        own = self._own_call(data[0])
        matrix = SymmetricStorage(self._task.slices, self._task.dtype, self._task.device, self._checked_out(out))
        try:
            value, slope = self._run(matrix)
        except GuardError:
            self._make(data)
            return self._planned(data, out) if self.plan is not None else self._unplanned(data, out)
        self._compare_loss(own.loss, value)
        if not self._is_own_gradient(own, slope):
            self._compare_with_engine(matrix.data, data, f"the module's own gradient is not that of the plan: {self._cause()}")
        elif not self._compared and self._moved():
            self._compare_with_engine(matrix.data, data, UNSEEN)
        return self._result(matrix, own, value, time.perf_counter() - start)

    # Making a plan

    def _make(self, data: tuple[Any, Any]) -> None:
        self.plan, self.reason = None, ""
        tasks, shares = gather(self.module, *data, **self._options)
        self._task, self._share, self._compared = tasks[0], shares[0], False
        evaluation = Evaluation(tasks, shares, self._options["batch_size"], None)
        expected = evaluation.whole()
        if len(evaluation.unused) == len(self._task.parameters):
            raise without_effect(WHO, self._task.parameters)
        self._fallbacks, self._size = evaluation.fallbacks, abs(evaluation.loss)
        self._slope = GenericSlope(self._task)
        self._given = replace(self._task, loss=self._options["loss"])  # whose settings may change after it was given a name
        self._tensors = [values for _, _, values in self._task.state.tensors()]
        self._tensors += [x for _, x in named_tensors((self._task.inputs, self._task.target))]
        self.plans += 1
        try:
            self.plan, self.reason = self._recorded(), ""
        except (PlanError, TraceError, NotImplementedError) as error:  # the same was traced just now, without being recorded
            self.reason = first_line(error.__cause__ or error)
            return
        self.plan._terms = self._block_terms
        self._at = [x.clone() for x in self._tensors]
        self._memory = MatrixMemory(self._task.size, self._task.dtype, self._task.device)
        matrix = SymmetricStorage(self._task.slices, self._task.dtype, self._task.device)
        self._run(matrix)
        matrix.mirror()
        self._check_same(matrix.data, expected, UNSEEN)

    def _recorded(self) -> ExecutionPlan:
        task = self._task
        matrix = SymmetricStorage(task.slices, task.dtype, task.device)
        allowed = int(SHARE * available_memory(task.device))
        record, constants = recording([*self._tensors, matrix.data], allowed), list[Tensor]()

        def add(trace: Trace, adjoints: Mapping[int, Tensor], share: float) -> None:
            self._slope.add(trace, adjoints, share)
            constants.extend(trace.constants)

        with preserved_random_states(task.module) as states, record as recorder, task.at(), torch.no_grad():
            value, _ = assemble_chunks(task, matrix, self._share, self._options["batch_size"], on_gradient=add)
            slope = self._slope.value()
            if states.drawn_from():
                raise PlanError("an operation draws random numbers")
        known = {storage_key(x) for x in self._tensors} | recorder.made
        theirs = {storage_key(x): x for x in constants if storage_key(x) not in known}  # the caller may write into them
        self._tensors += theirs.values()
        return make_plan(recorder, self._tensors, matrix.data, [value, slope], allowed, tuple(task.slices.values()))

    def _run(self, matrix: SymmetricStorage) -> tuple[float, float]:
        """Add the matrix; return the loss and its slope."""
        assert self.plan is not None
        with torch.inference_mode():
            value, slope = self.plan.run(matrix.data)
        matrix.skew = self.plan.skew
        return value, slope

    def _check_same(self, found: Tensor, expected: Tensor, why: str) -> None:
        scale = float(expected.abs().max())
        apart = float((found - expected).abs().max())
        if not apart <= AGREE * torch.finfo(found.dtype).eps * scale and math.isfinite(scale):
            raise TraceError(f"{WHO}: the plan gives a Hessian that is off by {apart / scale if scale else apart:.1e}: {why}")

    # One evaluation

    def _check_module(self) -> None:
        state, now = self._task.state, dict(self.module.named_parameters())
        for name, part in self.module.named_modules():
            if part.training is not state.modes.get(name, part.training):
                mode, before = ("training", "evaluation") if part.training else ("evaluation", "training")
                raise InputError(
                    f"{WHO}: {name or 'the module'!r} is in {mode} mode, and was in {before} mode when the plan was made; call "
                    f"module.{'eval' if part.training else 'train'}(), or make the function anew"
                )
        for name, x, values in state.tensors():
            if now.get(name, x) is not x or (name in self._task.parameters and name not in now):
                seen = "another tensor now" if name in now else "no parameter of the module now"
                raise InputError(f"{WHO}: the parameter {name!r} is {seen}; make the function anew")
            if name in self._task.parameters and not x.requires_grad:
                raise InputError(
                    f"{WHO}: the parameter {name!r} does not require grad now; call requires_grad_(True) on it, or make the "
                    "function anew"
                )
            _check_alike("the tensor {!r} of the module", name, x, values)
        chosen = select(WHO, self.module, self._options["params"])
        more = next((name for name in chosen if name not in self._task.parameters), None)
        if more is not None:
            raise InputError(
                f"{WHO}: the parameter {more!r} requires grad now, and is not among those of the plan; make the function anew, "
                "or pass params=[...] that leave it out"
            )

    def _take(self, data: tuple[Any, Any]) -> None:
        """Copy the present values of the module and the data to where the plan reads them."""
        self._task.state.refresh()
        positional, keywords = arguments(data[0])
        if tuple(keywords) != self._task.keywords:
            raise InputError(
                f"{WHO}: inputs has the keys {list(keywords)}, the plan is for {list(self._task.keywords)}; make the function "
                "anew"
            )
        given = (tuple(positional) + tuple(keywords.values()), data[1])
        for kind, new, old in zip(("inputs", "target"), given, (self._task.inputs, self._task.target), strict=True):
            news, olds = dict(named_leaves(new, kind)), dict(named_leaves(old, kind))
            if news.keys() != olds.keys():
                seen, planned = (", ".join(names) or "nothing" for names in (news, olds))
                raise InputError(f"{WHO}: {kind} holds {seen}, the plan is for {planned}; make the function anew")
            for name, x in news.items():
                self._take_leaf(name if len(news) > 1 else kind, x, olds[name])

    def _take_leaf(self, name: str, x: Any, before: Any) -> None:
        """Copy a tensor to where the plan reads it; hold anything else against what the plan was made with."""
        if isinstance(x, Tensor) and isinstance(before, Tensor):
            _check_alike("{}", name, x, before)
            if x is not before and not self._task.state.holds(before):
                with torch.no_grad():
                    before.copy_(x)
        elif x is not before and not (type(x) is type(before) and isinstance(x, PLAIN) and x == before):
            seen, planned = (repr(y) if isinstance(y, (int, float, str)) else f"a {type(y).__name__}" for y in (x, before))
            other = f"is {seen}, the plan is for {planned}" if seen != planned else f"is another {type(x).__name__}"
            raise InputError(f"{WHO}: {name} {other}; make the function anew")

    def _own_call(self, inputs: Any) -> OwnGradient:
        """Return loss and gradient of the module, and of the loss, as they are now."""
        with torch.inference_mode(False), torch.enable_grad():  # there is no plan of a module that draws random numbers
            try:
                made, _ = called(WHO, self._given, inputs, self._task.device, handshake=True)
            except InputError:
                one_kind(WHO, self.module, self._task.leaves, dtypes=True)  # a parameter may be the cause, which is named then
                raise
        assert made.reference is not None
        return made.reference

    def _compare_loss(self, own: float, value: float) -> None:
        if abs(own - value) <= ROUNDING * self._slope.eps * max(abs(own), abs(value), self._size):
            return
        if not (math.isfinite(own) and math.isfinite(value)):
            return  # the matrix is not finite either, and the error for that names the operation
        raise TraceError(f"{WHO}: the module's own loss is {own:.6g}, that of the plan {value:.6g}: {self._cause()}")

    def _is_own_gradient(self, own: OwnGradient, slope: float) -> bool:
        """Tell whether the slope is that of the module's own call, up to rounding."""
        expected, size = self._slope.expected(own)
        return not math.isfinite(expected) or abs(expected - slope) <= ROUNDING * self._slope.eps * size

    def _cause(self) -> str:
        changed = self._task.state.changed_attribute()
        cause = f"its {changed!r} has changed" if changed else "it takes another branch, or reads something that has changed"
        return f"{cause}; make the function anew"

    def _moved(self) -> bool:
        return any(not torch.equal(x, before) for x, before in zip(self._tensors, self._at, strict=True))

    def _compare_with_engine(self, upper: Tensor, data: tuple[Any, Any], why: str) -> None:
        """Compare the blocks (i, j), i not after j, with those that :func:`hessian` finds here."""
        expected, found = hessian(self.module, *data, **self._options).matrix, upper.clone()
        for rows in self._task.slices.values():
            found[rows.stop :, rows] = expected[rows.stop :, rows]
            found[rows, rows] = (found[rows, rows] + found[rows, rows].T) / 2
        self._check_same(found, expected, why)
        self._compared = True

    def _result(self, matrix: SymmetricStorage, own: OwnGradient, value: float, seconds: float) -> Hessian:
        start = time.perf_counter()
        asymmetry = matrix.mirror()
        if not matrix.is_finite:
            check_finite(WHO, matrix.data, self._task.slices, [self._task])
        task = self._snapshot(own)
        evaluation = Evaluation([task], [self._share], self._options["batch_size"], None)
        evaluation.take(matrix.data, self._share * value, asymmetry, self._fallbacks)
        evaluation.seconds = seconds + time.perf_counter() - start
        shapes = task.shapes
        return Hessian(tuple(shapes), task.slices, shapes, evaluation)

    def _snapshot(self, own: OwnGradient) -> Task:
        """Return the request as it is now, for what a result computes later and compares with the module's own call."""
        task, state = self._task, self._task.state.copied()

        def copied(x: Tensor) -> Tensor:
            return x if task.state.holds(x) else x.detach().clone().requires_grad_(x.requires_grad)

        parameters = {name: state.values[name] for name in task.parameters}
        inputs, target = map_tensors(copied, (task.inputs, task.target))
        return replace(task, state=state, parameters=parameters, inputs=inputs, target=target, reference=own)

    def _checked_out(self, out: Tensor | None) -> Tensor:
        if out is None:
            found = self._memory.again()
            if found is None:
                check_matrix(self._task.size, self._task.dtype, self._task.device)
                found = self._memory.new()
            return found
        n, dtype, device = self._task.size, self._task.dtype, self._task.device
        if out.shape != (n, n) or out.dtype != dtype or out.device != device or not out.is_contiguous() or out.requires_grad:
            raise InputError(
                f"{WHO}: out has shape {tuple(out.shape)}, {out.dtype} on {out.device}; pass a contiguous tensor of shape "
                f"{(n, n)}, {dtype} on {device}, without requires_grad"
            )
        return out

    def _unplanned(self, data: tuple[Any, Any], out: Tensor | None) -> Hessian:
        found = hessian(self.module, *data, **self._options)
        if out is not None:
            found._evaluation.take(self._checked_out(out).copy_(found.matrix), found.loss, found.asymmetry, found.fallbacks)  # type: ignore[union-attr]
        return found

    def _block_terms(self, i: str, j: str) -> BlockTerms:
        assert self.plan is not None
        task = self._task
        traced = loss_trace(task, normalizer_of(task)).trace
        return block_terms(traced, i, j, scale=self._share, slices=task.slices, steps=self.plan.steps)

    # Printing

    def _headline(self) -> str:
        size = f"Hessian function of {self._task.size} parameters"
        return f"{size}, without a plan: {self.reason}" if self.plan is None else f"{size}: {self.plan._headline()}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        if self.plan is not None:
            yield from list(self.plan._parts())[1:]


def _check_alike(what: str, name: str, x: Tensor, planned: Tensor) -> None:
    for kind in ("shape", "dtype", "device"):
        seen, expected = getattr(x, kind), getattr(planned, kind)
        if seen != expected:
            if kind == "shape":
                seen, expected = tuple(seen), tuple(expected)
            raise InputError(f"{WHO}: {what.format(name)} has {kind} {seen}, the plan is for {expected}; make the function anew")


@checked(WHO)
@one_at_a_time
def hessian_function(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    loss: Loss = "mse",
    params: Params = None,
    batch_size: int | None = None,
) -> HessianFunction:
    """Return the Hessian as a function of the module's parameters and of data of the same shapes, planned once.

    What :func:`hessiankit.hessian` decides by structure (the trace, the vertices, the order of elimination, the bracketing of
    every product) is decided here; an evaluation runs the operations that are left, on memory of its own. For curvature along
    a training run, over many batches or single samples.

    Args:
        module: As in :func:`hessiankit.hessian`, like all other arguments.
        inputs: One batch.
        target: What the loss compares with.
        loss: The loss.
        params: Which parameters.
        batch_size: Samples treated at once.

    Returns:
        A callable ``f(inputs=None, target=None, *, out=None)`` that gives a :class:`~hessiankit.curvature.dense.Hessian`;
        ``print(f)`` shows the plan, ``f.plan.explain(i, j)`` the terms of one block. Where a plan would take more than a quarter
        of the free memory, or where Python computes with numbers of the module, there is no plan, ``f.reason`` says why, and f
        calls ``hessian``.

    Raises:
        InputError: As :func:`hessiankit.hessian`; or several batches are given: call the function with one after the other.
        TraceError: As :func:`hessiankit.hessian`.

    The Hessian of w^3 / 2 in w, 3 w, at two points:

    >>> class Cubed(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    ...     def forward(self, x):
    ...         return (x * self.w**3).sum()
    >>> cubed = Cubed()
    >>> f = hessian_function(cubed, torch.tensor([0.5], dtype=torch.float64), loss=None)
    >>> with torch.no_grad():
    ...     _ = cubed.w.fill_(5.0)
    >>> f().matrix.item(), f(torch.tensor([1.0], dtype=torch.float64)).matrix.item()
    (15.0, 30.0)
    """
    several, _ = batches(WHO, inputs, target, loss)
    if several:
        raise InputError(f"{WHO}: inputs are several batches; pass one, and call the function with each of them")
    if target is None and isinstance(inputs, (tuple, list)) and loss is not None:
        inputs, target = inputs
    return HessianFunction(module, inputs, target, loss, params, batch_size)
