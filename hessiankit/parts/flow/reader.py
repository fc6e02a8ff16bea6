"""Reads a run of the model, operation by operation: which weight multiplies what, and what attention is made of.

The run is repeated with gradients cut at the input of every multiplication by a weight. The entries of a weight that then have
a gradient from the queries of a softmax are those that make queries, whatever the order of a fused weight, and through norms,
rotary embeddings and reshapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hessiankit.parts.flow import operations as ops
from hessiankit.parts.flow.value import Ids, Rank, Value, added, joined
from hessiankit.tracing.graph import Node, map_nodes
from hessiankit.tracing.notes import Recording


@dataclass
class Multiplication:
    """One multiplication by a weight: which, what is added, what it reads, and whether the data choose among weights."""

    weight: frozenset[str]
    bias: frozenset[str]
    read: Value
    expert: bool


@dataclass
class Reading:
    """What a run shows of the parameters.

    Attributes:
        multiplications: By the number of the operation.
        masks: Entries of a parameter that make queries, keys, values: by parameter and role.
        plain: Other uses of a parameter, by its name: ``"gain"``, ``"lookup"``, ``"joined"``, ...
        residual: Multiplications whose output is added to other activations.
        routers: Multiplications of whose output the largest entries are taken.
        mixed: Multiplications whose output is a factor of a product of activations.
        output: What the model's output is made of.
    """

    multiplications: dict[int, Multiplication] = field(default_factory=dict)
    masks: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    plain: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    residual: set[int] = field(default_factory=set)
    routers: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    output: Value = field(default_factory=Value)


def read(recording: Recording, parameters: Mapping[str, Tensor], data: Sequence[Tensor]) -> Reading:
    """Return what a recorded run shows of the parameters.

    Args:
        recording: Of a function of the parameters, then the data (:func:`hessiankit.tracing.recording.record`).
        parameters: Their values by name, in that order.
        data: The other arguments.
    """
    return _Reader(recording, parameters, data).reading


class _Reader:
    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor], data: Sequence[Tensor]) -> None:
        self.reading = Reading()
        self.leaves = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in parameters.items()}
        self.known: dict[Node, Any] = {}
        self.values: dict[Node, Value] = {}
        self.operands: dict[int, tuple[Tensor, Tensor]] = {}  # factors of a product of activations, before they were cut
        self.seen: set[int] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.at: dict[int, list[Node]] = defaultdict(list)  # nodes by memory
        given = iter([*self.leaves.items(), *(("", x) for x in data)])
        with torch.enable_grad():
            for number, node in enumerate(recording.graph.nodes):
                if node.op == "placeholder":
                    name, self.known[node] = next(given)
                    self.values[node] = Value(Rank.WEIGHT, frozenset({name})) if name else Value(Rank.DATA)
                elif node.op == "get_attr":
                    self.known[node], self.values[node] = recording.constants[str(node.target)], Value()
                elif node.op == "segment":
                    self.known[node], self.values[node] = recording.unseen[node].root.detach(), joined(self._of(node.args))
                elif node.op == "output":
                    self.reading.output = joined(self._of(torch.utils._pytree.tree_leaves(node.args)))
                    continue
                elif node.target is not torch._C._set_grad_enabled:
                    self.values[node] = self._operation(number, node)
                self._remember(node)

    def _remember(self, node: Node) -> None:
        if (place := ops.storage(self.known.get(node))) is not None:
            self.at[place].append(node)

    def _of(self, nodes: Any) -> list[Value]:
        return [self.values[n] for n in torch.utils._pytree.tree_leaves(nodes) if isinstance(n, Node) and n in self.values]

    def _operation(self, number: int, node: Node) -> Value:
        """Run one operation, and return what is known of its result."""
        name, writes = ops.name_of(node)
        value = self._product(number, node, name) or self._attention(number, node, name) or self._other(number, node, name)
        self._run(node)
        if isinstance(x := self.known[node], Tensor) and not x.is_floating_point():
            value = Value(value.rank)  # an index or a mask: what it was computed from does not flow through it
        if writes:  # every view of that memory sees it
            for other in self.at.get(ops.storage(self.known[node]) or 0, []):
                self.values[other] = joined((self.values[other], value))
            value = joined((value, *self._of(node.args[:1])))
        return value

    def _run(self, node: Node, cut: Sequence[Node] = ()) -> None:
        if node in self.known:
            return
        args, kwargs = map_nodes(lambda n: self.known[n].detach() if n in cut else self.known[n], (node.args, node.kwargs))
        self.known[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    # -- products ----------------------------------------------------------------------------------------------------------

    def _product(self, number: int, node: Node, name: str) -> Value | None:
        found = ops.factors(name, node.args)
        if found is None or not all(isinstance(f, Node) and f in self.values for f in found[0]):
            return None
        (first, second), bias, ordered = found
        a, b = self.values[first], self.values[second]
        if ordered and b.is_weight:
            weight, other = second, first
        elif a.is_weight and a.rank < b.rank:
            weight, other = first, second
        elif (b.is_weight and b.rank < a.rank) or (a.is_weight and b.is_weight):
            weight, other = second, first
        elif a.rank is Rank.DATA and b.rank is Rank.DATA:
            return self._activations(number, node, first, second, bias)
        else:
            return None  # by a constant
        return self._by_weight(number, node, weight, other, bias)

    def _by_weight(self, number: int, node: Node, weight: Node, other: Node, bias: Any) -> Value:
        reading, read_from = self.reading, self.values[other]
        if read_from.is_weight:
            self._use(read_from, "joined")
        chosen = self.values[weight].rank is Rank.CHOSEN
        if chosen:
            self._use(self.values[weight], "of an expert")  # and no embedding
        added_to = self.values[bias] if isinstance(bias, Node) else Value()
        biases = added_to.params if added_to.is_weight else frozenset()
        expert = chosen or ops.name_of(node)[0] == "_grouped_mm"
        reading.multiplications[number] = Multiplication(self.values[weight].params, biases, read_from, expert)
        self._run(node, cut=[other, *([bias] if isinstance(bias, Node) and added_to.rank is Rank.DATA else [])])
        return Value(Rank.DATA, fed=frozenset({number}), direct=("weight", number), deep=True)

    def _activations(self, number: int, node: Node, first: Node, second: Node, bias: Any) -> Value:
        a, b = self.values[first], self.values[second]
        self.operands[number] = (self.known[first], self.known[second])
        self._run(node, cut=[first, second])
        for name in self._of([bias]):
            self._use(name, "added to scores")
        deep, products = a.deep or b.deep, frozenset({number})
        if bool(a.probs) is not bool(b.probs):
            self._mask("value", self.known[second if a.probs else first])
            return Value(Rank.DATA, products=products, context=products, deep=deep)
        self.reading.mixed |= a.fed | b.fed
        return Value(Rank.DATA, products=products | a.products | b.products, scores=products | a.scores | b.scores, deep=deep)

    def _attention(self, number: int, node: Node, name: str) -> Value | None:
        made_of = ops.attention_of(name, node.args)
        if made_of is not None:
            for role, operand in zip(("query", "key", "value"), made_of, strict=True):
                self._mask(role, self.known[operand])
            for extra in self._of([*node.args[3:], *node.kwargs.values()]):
                self._use(extra, "added to scores")
            self._run(node, cut=made_of)
            return Value(Rank.DATA, products=frozenset({number}), context=frozenset({number}), deep=True)
        if name in ops.SOFTMAX:
            scores = self.values[node.args[0]]  # type: ignore[index]
            if scores.scores:
                for product in scores.scores - self.seen:
                    for role, operand in zip(("query", "key"), self.operands[product], strict=True):
                        self._mask(role, operand)
                self.seen |= scores.scores
                self._run(node, cut=[node.args[0]])  # type: ignore[list-item]
                return replace(scores, fed=frozenset(), scores=frozenset(), probs=frozenset({number}), direct=None)
        return None

    def _mask(self, role: str, operand: Tensor) -> None:
        """Note the entries of the parameters that have a gradient from a tensor."""
        if not operand.requires_grad:
            return
        leaves = [(name, p) for name, p in self.leaves.items() if p.requires_grad]
        direction = torch.randn(operand.shape, generator=self.generator, dtype=torch.float64).to(operand)
        found = torch.autograd.grad(operand, [p for _, p in leaves], direction, retain_graph=True, allow_unused=True)
        for (name, _), gradient in zip(leaves, found, strict=True):
            if gradient is not None and bool((gradient != 0).any()):
                before = self.reading.masks[name].get(role)
                self.reading.masks[name][role] = gradient != 0 if before is None else before | (gradient != 0)

    # -- everything else ---------------------------------------------------------------------------------------------------

    def _other(self, number: int, node: Node, name: str) -> Value:
        inputs = self._of([node.args, node.kwargs])
        value = joined(inputs)
        if name in ops.EMPTY:
            return Value()
        if name in ops.NORMS:
            return self._norm(number, node, name)
        if name in ops.LOOKUPS:
            table = self.values[node.args[0]]  # type: ignore[index]
            self._use(table, "lookup")
            return replace(table, rank=Rank.CHOSEN, direct=None)
        if name in ops.CHOICES and inputs[0].is_weight:
            if value.rank is not Rank.DATA:  # by a constant index: another arrangement of the parameter
                return replace(inputs[0], direct=None)
            self._use(inputs[0], "chosen")
            return replace(inputs[0], rank=Rank.CHOSEN, direct=None)
        if name in ops.ROUTING:
            self.reading.routers |= value.fed
        if name in ops.RESHAPING and inputs:
            return replace(inputs[0], rank=value.rank) if value.rank is not inputs[0].rank else inputs[0]
        weights, data = [v for v in inputs if v.is_weight], [v for v in inputs if v.rank is Rank.DATA]
        if not data and {v.rank for v in weights} >= {Rank.WEIGHT, Rank.CHOSEN}:  # rows of one table, and a whole parameter
            data = [v for v in weights if v.rank is Rank.CHOSEN]
            weights = [v for v in weights if v.rank is Rank.WEIGHT]
        if weights and data:
            return self._with_weights(number, name, weights, data, value)
        if len(data) == 2 and name in ops.SUMS:
            self.reading.residual |= data[0].fed ^ data[1].fed
            return added(*data)
        return replace(value, direct=None)

    def _norm(self, number: int, node: Node, name: str) -> Value:
        for place, use in zip(ops.NORMS[name], ("gain", "norm bias"), strict=True):
            if place is not None and place < len(node.args):
                for value in self._of([node.args[place]]):
                    self._use(value, use)
        return replace(self.values[node.args[0]], rank=Rank.DATA, params=frozenset(), direct=("gain", number))  # type: ignore[index]

    def _with_weights(self, number: int, name: str, weights: list[Value], data: list[Value], value: Value) -> Value:
        """An operation of parameters and activations that is no product of matrices."""
        direct = None
        for weight in weights:
            if weight.rank is Rank.CHOSEN and name in ops.SUMS:
                kind, source = data[0].direct or ("", -1)
                if kind == "weight" and self.reading.multiplications[source].expert:
                    self._use(weight, "of an expert")
                    self._added(weight, data[0])
                continue  # other rows that were looked up are the beginning of the residual
            if name in ops.SCALINGS:
                self._use(weight, "gain" if weight.rank is Rank.WEIGHT else "lookup")
                direct = ("gain", number)
            elif name in ops.SUMS:
                self._added(weight, data[0])
                direct = data[0].direct
            elif name in ops.JOINS:
                self._use(weight, "sink" if any(v.scores for v in data) else "joined")
            else:
                self._use(weight, "other")
        return replace(value, rank=Rank.DATA, params=frozenset(), direct=direct)

    def _added(self, weight: Value, data: Value) -> None:
        if data.scores:
            self._use(weight, "added to scores")
        elif data.direct is None or not self._fits(weight, data.direct):
            self._use(weight, "added")
        elif data.direct[0] == "gain":
            self._use(weight, "norm bias")
        else:
            self.reading.multiplications[data.direct[1]].bias |= weight.params

    def _fits(self, bias: Value, direct: tuple[str, int]) -> bool:
        """Tell whether parameters have the number of axes of a bias: one, or two beside stacked experts."""
        kind, number = direct
        weights = self.reading.multiplications[number].weight if kind == "weight" else frozenset()
        stacked = any(self.leaves[name].ndim == 3 for name in weights)
        return all(self.leaves[name].ndim <= (2 if stacked else 1) for name in bias.params)

    def _use(self, value: Value, use: str) -> None:
        for name in value.params if value.is_weight else ():
            self.reading.plain[name].add(use)


__all__ = ["Ids", "Multiplication", "Reading", "read"]
