"""Columns of the Hessian of a module's loss in 400 digits, and what storing every number in float64 would do to them.

The module's own operations are read from torch, before they are taken apart, and evaluated on arrays of mpmath numbers; a tape
gives the gradient, and a difference of two gradients a column. Nothing is shared with hessiankit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import torch
from digit_operations import COMPUTED, Array, Pull, cross_entropy, exact, rearrange, squared_error, taken
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

DIGITS, STEP = 400, "1e-120"
HALF_ULP = 2.0**-53


class ManyDigits:
    """The loss of a module, as a function of its parameters.

    Args:
        module: Of operations that ``digit_operations`` knows, or that only move entries about.
        inputs: One tensor.
        target: As ``hk.hessian`` takes it.
        loss: "mse" or "cross_entropy".
    """

    def __init__(self, module: nn.Module, inputs: Tensor, target: Tensor, loss: str) -> None:
        names, self.leaves = [n for n, _ in module.named_parameters()], [*(p.detach() for p in module.parameters()), inputs]
        with torch.no_grad():
            run = make_fx(
                lambda *at: torch.func.functional_call(module, dict(zip(names, at, strict=False)), at[-1:]), pre_dispatch=True
            )
            self.graph = run(*self.leaves).graph
        (self.output,) = self.graph.output_node().all_input_nodes
        self.loss = squared_error if loss == "mse" else cross_entropy
        self.target: Any = exact(target) if loss == "mse" else target.numpy()

    def column(self, k: int, *, rounded: int | None = None) -> Tensor:
        """Return the derivative of the gradient by entry k of all parameters, one after the other.

        Args:
            k: The entry.
            rounded: A seed: every operand, result and adjoint, and the tangent of each, is then moved by up to half a unit in
                the last place of float64, as if stored in it, while each operation and its derivatives stay exact. What that
                changes is lost to any method that keeps these numbers in float64; what it does not change is not.
        """
        with mp.workdps(DIGITS):
            here = _Run(self, k, mp.mpf(0), rounded)
            slope, h = here.gradient(), mp.mpf(STEP)
            ahead = _Run(self, k, h, rounded, here.seen).gradient()
            return torch.tensor([float(v) for v in (ahead - slope) / h], dtype=torch.float64)


class _Run:
    """One evaluation and its tape; ``base`` are the numbers that were stored in a run without the step, in their order."""

    def __init__(self, what: ManyDigits, k: int, step: Any, rounded: int | None, base: list[Array] | None = None) -> None:
        self.seen: list[Array] = []
        self.base = None if base is None else iter(base)
        self.what = what
        self.random = None if rounded is None else np.random.default_rng(rounded)
        self.values: dict[Node, Any] = {}
        self.tape: list[tuple[Node, list[Node], Pull]] = []
        self.inputs = [node for node in what.graph.nodes if node.op == "placeholder"]
        for node, leaf in zip(self.inputs, what.leaves, strict=True):
            self.values[node] = exact(leaf)
        start = 0
        for node in self.inputs[:-1]:
            value = self.values[node].reshape(-1)
            if start <= k < start + value.size:
                value[k - start] += step
            start += value.size

    def gradient(self) -> Array:
        for node in self.what.graph.nodes:
            if node.op == "call_function":
                self._apply(node)
        output = self.what.output
        _, pull = self.what.loss(self._stored(self.values[output]), self.what.target)
        adjoints: dict[Node, Array] = {output: self._stored(pull(mp.mpf(1))[0])}
        for node, operands, pull in reversed(self.tape):
            if node in adjoints:
                for operand, w in zip(operands, pull(adjoints[node]), strict=True):
                    adjoints[operand] = adjoints.get(operand, 0) + self._stored(w)
        zeros = {n: np.full(self.values[n].shape, mp.mpf(0)) for n in self.inputs[:-1]}
        return np.concatenate([np.asarray(adjoints.get(n, zero)).reshape(-1) for n, zero in zeros.items()])

    def _stored(self, x: Any) -> Any:
        if self.random is None or not isinstance(x, np.ndarray):
            return x
        own, of_tangent = (1 + self.random.uniform(-HALF_ULP, HALF_ULP, x.shape).astype(object) for _ in range(2))
        if self.base is None:
            self.seen.append(x)
            return x * own
        before = next(self.base)
        return np.where(before == mp.mpf("-inf"), x, before * own + (x - before) * of_tangent)

    def _apply(self, node: Node) -> None:
        """Evaluate one operation; what depends neither on parameters nor on the inputs stays torch's."""
        arguments = [self._value(a) for a in node.args]
        kind = str(getattr(node.target, "__name__", "")).split(".")[0]
        first, rest = arguments[0], arguments[1:]
        if kind == "getitem" and isinstance(first, _Parts):
            self._take(node, first.nodes, first.positions[rest[0]], first.starts)
        elif not any(isinstance(a, np.ndarray) for a in [*arguments, *(first if isinstance(first, list) else [])]):
            assert callable(node.target)
            self.values[node] = node.target(*arguments, **node.kwargs)
        elif kind in COMPUTED:
            arguments = [exact(a) if isinstance(a, Tensor) else a for a in arguments]
            out, pull = COMPUTED[kind](*(self._stored(a) for a in arguments), **node.kwargs)
            self.values[node] = self._stored(out)
            moving = [isinstance(a, Node) for a in node.args]
            nodes = [n for n in node.args if isinstance(n, Node)]
            assert all(isinstance(arguments[i], np.ndarray) == m for i, m in enumerate(moving))
            self.tape.append((node, nodes, pull))
        else:
            self._rearrange(node, kind, first, rest)

    def _rearrange(self, node: Node, kind: str, first: Any, rest: list[Any]) -> None:
        nodes = list(node.args[0]) if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        operands = first if isinstance(first, list) else [first]
        if kind == "masked_fill":
            assert rest[1] == -torch.inf
            rest = [rest[0], -1]
        if kind == "to":
            rest = []
        operation: Callable[..., Any] = (lambda x: x) if kind == "to" else node.target  # type: ignore[assignment]
        positions, starts = rearrange(operation, operands, *rest, **node.kwargs)
        if isinstance(positions, Tensor):
            self._take(node, nodes, positions, starts)
        else:
            self.values[node] = _Parts(nodes, positions, starts)

    def _take(self, node: Node, nodes: list[Any], positions: Tensor, starts: Any) -> None:
        self.values[node], pull = taken([self.values[n] for n in nodes], positions, starts)
        self.tape.append((node, nodes, pull))

    def _value(self, a: Any) -> Any:
        if isinstance(a, (list, tuple)) and any(isinstance(v, Node) for v in a):
            return [self.values[v] for v in a]
        return self.values[a] if isinstance(a, Node) else a


class _Parts:
    """What an operation with several results took from where."""

    def __init__(self, nodes: list[Any], positions: Any, starts: Any) -> None:
        self.nodes, self.positions, self.starts = nodes, positions, starts
