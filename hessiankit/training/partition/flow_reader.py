"""One run of the model, operation by operation: multiplications by weights, and the operands of attention.

The run is repeated with gradients cut at the input of every multiplication by a weight. The entries of a weight that then have
a gradient from the queries of a softmax are its query entries, for any layout of a fused weight, and through norms, rotary
embeddings and reshapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.containers import address
from hessiankit.tracing.graph import Node, Recording, map_nodes
from hessiankit.training.partition.summands import Ids, Summand, Sums, summand


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


RESHAPING = _words(
    "view reshape _unsafe_view _reshape_alias view_as reshape_as transpose permute t swapaxes swapdims movedim moveaxis numpy_T "
    "mT expand expand_as broadcast_to repeat repeat_interleave tile slice select narrow squeeze unsqueeze contiguous clone "
    "_to_copy to type_as alias detach flatten unflatten split split_with_sizes chunk unbind tensor_split dropout getitem roll "
    "lift_fresh float double half bfloat16 unfold flip tril triu _conj"
)
LOOKUPS = _words("embedding embedding_bag")
CHOICES = _words("index index_select gather take")
SUMS = _words("add sub rsub __iadd__ index_add scatter_add")
TOTALS = _words("sum mean neg masked_fill stack")
CUTS = _words("getitem select slice narrow")
SCALINGS = _words("mul div multiply divide addcmul")
JOINS = _words("cat concat concatenate stack hstack vstack where index_put masked_scatter copy index_copy slice_scatter")
EMPTY = _words("new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like rand_like size sym_size")
SOFTMAX = _words("softmax _softmax _safe_softmax")
ROUTING = _words("topk")
NORMS = {  # position of gain and bias
    "layer_norm": (2, 3),
    "native_layer_norm": (2, 3),
    "rms_norm": (2, None),
    "_fused_rms_norm": (2, None),
    "group_norm": (2, 3),
    "native_group_norm": (1, 2),
    "batch_norm": (1, 2),
    "native_batch_norm": (1, 2),
    "cudnn_batch_norm": (1, 2),
    "instance_norm": (1, 2),
}
_CONVOLUTIONS = _words("conv1d conv2d conv3d convolution _convolution")
_SIMPLE = _words("matmul mm bmm mv dot _grouped_mm linear_backward inner tensordot")


def name_of(node: Node) -> tuple[str, bool]:
    """Return an operation's name without the overload, and whether it writes into its first input.

    ``aten.add_.Tensor`` is ``("add", True)``.
    """
    name: str = getattr(node.target, "_opname", "") or getattr(node.target, "__name__", str(node.target))
    writes = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if writes else name), writes


def factors(name: str, args: tuple[Any, ...]) -> tuple[list[Any], Any, bool] | None:
    """Return the factors of a product, its bias, and whether the operation defines its second factor as the weight."""
    if name == "linear" or name in _CONVOLUTIONS:
        return [args[0], args[1]], args[2] if len(args) > 2 else None, True
    if name in ("addmm", "baddbmm", "addmv", "addbmm"):
        return [args[1], args[2]], args[0], False
    if name in _SIMPLE:
        return list(args[:2]), None, False
    if name == "einsum":
        operands = list(args[1])
        return (operands, None, False) if len(operands) == 2 else None
    return None


class Rank(IntEnum):
    """Dependence of a tensor: on nothing, parameters, rows of parameters chosen by an index, or the model's inputs."""

    CONSTANT = 0
    WEIGHT = 1
    ROWS = 2
    DATA = 3


@dataclass(frozen=True)
class FlowValue:
    """The provenance of one tensor."""

    rank: Rank = Rank.CONSTANT
    params: frozenset[str] = frozenset()  # names of the parameters that it is computed from; empty for data
    sources: Ids = frozenset()  # multiplications by weights that it comes from with no other such multiplication between
    products: Ids = frozenset()  # products of two activations since the last multiplication by a weight
    scores: Ids = frozenset()  # those products that no softmax has followed
    probs: Ids = frozenset()  # softmaxes of such scores that it comes from
    context: Ids = frozenset()  # applications of attention whose output it is part of
    summands: frozenset[Summand] = frozenset()  # what it is the sum of, up to reshaping and constant factors
    has_weight: bool = False  # whether any multiplication by a weight precedes it

    @property
    def is_weight(self) -> bool:
        """Whether the tensor depends on parameters, or rows of them, alone."""
        return self.rank in (Rank.WEIGHT, Rank.ROWS)


def joined(values: Iterable[FlowValue]) -> FlowValue:
    """Return the provenance of a tensor computed from others.

    >>> joined([FlowValue(Rank.DATA, sources=frozenset({1})), FlowValue(Rank.DATA, sources=frozenset({2}))]).sources
    frozenset({1, 2})
    """
    items = list(values)
    if not items:
        return FlowValue()
    rank = max(v.rank for v in items)
    unions = {
        name: frozenset().union(*(getattr(v, name) for v in items))
        for name in ("sources", "products", "scores", "probs", "context", "summands")
    }
    params = frozenset().union(*(v.params for v in items)) if rank < Rank.DATA else frozenset()
    return FlowValue(rank, params, has_weight=any(v.has_weight for v in items), **unions)


@dataclass
class Multiplication:
    """One multiplication by a weight: its weight and input, and whether the data choose among stacked weights."""

    weight: frozenset[str]
    read: FlowValue
    expert: bool


class Run:
    """Uses of the parameters in one recorded run, of a function of the parameters, then the data."""

    output: FlowValue  # provenance of the model's output
    residual: set[int]  # multiplications whose output is added to other activations

    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor], data: Sequence[Tensor]) -> None:
        self.multiplications: dict[int, Multiplication] = {}  # by the number of the operation
        self.masks: dict[str, dict[str, Tensor]] = defaultdict(dict)  # query, key and value entries, by parameter and role
        self.uses: dict[str, set[str]] = defaultdict(set)  # other uses of a parameter: "gain", "lookup", "joined", ...
        self.biases: dict[str, set[int]] = defaultdict(set)  # multiplications and gains that a parameter is the bias of
        self.gains: set[int] = set()  # operations that multiply activations by a gain
        self.routers: set[int] = set()  # multiplications of whose output, or of a product of it, the largest entries are taken
        self.gates: set[int] = set()  # multiplications whose output multiplies that of attention entry by entry
        self.scales: dict[str, list[FlowValue]] = defaultdict(list)  # what a parameter multiplies entry by entry
        self.factors: dict[int, Ids] = {}  # by the number of a product of activations: the multiplications that make its factors
        self.leaves = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in parameters.items()}
        self.tensors: dict[Node, Any] = {}
        self.values: dict[Node, FlowValue] = {}
        self.operands: dict[int, tuple[Tensor, Tensor]] = {}  # factors of a product of activations, before they were cut
        self.softmax_products: set[int] = set()  # products that a softmax has followed
        self.sums = Sums()
        self.vectors: dict[tuple[int, str], bool] = {}  # parameters that were added: whether every row gets the same
        self.contexts: set[int] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.at: dict[int, list[Node]] = defaultdict(list)  # nodes by memory
        leaf_values = iter([*self.leaves.items(), *(("", x) for x in data)])
        with torch.enable_grad():
            for number, node in enumerate(recording.graph.nodes):
                if node.op == "placeholder":
                    name, self.tensors[node] = next(leaf_values)
                    weight, datum = FlowValue(Rank.WEIGHT, frozenset({name})), FlowValue(Rank.DATA, summands=summand(number))
                    self.values[node] = weight if name else datum
                elif node.op == "get_attr":
                    self.tensors[node], self.values[node] = recording.constants[str(node.target)], FlowValue()
                elif node.op == "segment":
                    segment_value = self._opaque(number, self._of(node.args))
                    self.tensors[node], self.values[node] = recording.unseen[node].root.detach(), segment_value
                elif node.op == "output":
                    self.output = self._opaque(number, self._of(torch.utils._pytree.tree_leaves(node.args)))
                    continue
                elif node.target is not torch._C._set_grad_enabled:
                    self.values[node] = self._operation(number, node)
                if isinstance(x := self.tensors.get(node), Tensor):
                    self.at[address(x)].append(node)
        self.residual = self.sums.residual()
        self.product_factors = frozenset[int]().union(*self.factors.values())
        for name, operands in self.scales.items():
            if all(self._is_head(value) for value in operands):
                self.uses[name].add("logit scale")
        self._assign()

    def _is_head(self, value: FlowValue) -> bool:
        """Whether a value is the output of weights behind which there is no other weight or sum, up to constant factors."""
        makers = self.sums.makers(value.summands)
        return bool(makers) and makers <= self.multiplications.keys() & self.output.sources - self.residual

    def _of(self, nodes: Any) -> list[FlowValue]:
        return [self.values[n] for n in torch.utils._pytree.tree_leaves(nodes) if isinstance(n, Node) and n in self.values]

    def _operation(self, number: int, node: Node) -> FlowValue:
        """Run one operation, and return the provenance of its result."""
        name, writes = name_of(node)
        value = self._product(number, node, name) or self._attention(number, node, name) or self._other(number, node, name)
        self._run(node)
        x = self.tensors[node]
        if isinstance(x, Tensor) and not x.is_floating_point():
            value = FlowValue(value.rank)  # an index or a mask carries no provenance
        if writes:  # every view of that memory changes
            for view in self.at.get(address(x), []) if isinstance(x, Tensor) else ():
                self.values[view] = joined((self.values[view], value))
            value = joined((value, *self._of(node.args[:1])))
        return value

    def _run(self, node: Node, cut: Sequence[Node] = ()) -> None:
        if node in self.tensors:
            return
        args, kwargs = map_nodes(lambda n: self.tensors[n].detach() if n in cut else self.tensors[n], (node.args, node.kwargs))
        self.tensors[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    # -- products ----------------------------------------------------------------------------------------------------------

    def _product(self, number: int, node: Node, name: str) -> FlowValue | None:
        product = factors(name, node.args)
        if product is None or not all(isinstance(f, Node) and f in self.values for f in product[0]):
            return None
        (first, second), bias, is_ordered = product
        a, b = self.values[first], self.values[second]
        if is_ordered and b.is_weight:
            weight, source = second, first
        elif a.is_weight and a.rank < b.rank:
            weight, source = first, second
        elif (b.is_weight and b.rank < a.rank) or (a.is_weight and b.is_weight):
            weight, source = second, first
        elif a.rank is Rank.DATA and b.rank is Rank.DATA:
            return self._activations(number, node, first, second, bias)
        else:
            return None  # by a constant
        return self._by_weight(number, node, weight, source, bias)

    def _by_weight(self, number: int, node: Node, weight: Node, source: Node, bias: Any) -> FlowValue:
        read_from = self.values[source]
        if read_from.is_weight:
            self._use(read_from, "joined")
        is_selection = self.values[weight].rank is Rank.ROWS
        if is_selection:
            self._use(self.values[weight], "of an expert")  # not an embedding
        expert = is_selection or name_of(node)[0] == "_grouped_mm"
        self.multiplications[number] = Multiplication(self.values[weight].params, read_from, expert)
        self._read(read_from)
        self.sums.sources[number] = frozenset({number})
        added_to = self.values[bias] if isinstance(bias, Node) else FlowValue()
        self._run(node, cut=[source, *([bias] if added_to.rank is Rank.DATA else [])])
        value = FlowValue(Rank.DATA, sources=frozenset({number}), summands=summand(number), has_weight=True)
        if added_to.is_weight and all(self._fits(name, number, _is_vector(self.tensors[bias])) for name in added_to.params):
            for name in added_to.params:
                self.biases[name].add(number)
            return value
        return self._sum(number, [(value, self.tensors[node]), (added_to, self.tensors.get(bias))])

    def _activations(self, number: int, node: Node, first: Node, second: Node, bias: Any) -> FlowValue:
        a, b = self.values[first], self.values[second]
        self.operands[number] = (self.tensors[first], self.tensors[second])
        self._run(node, cut=[first, second])
        self._read(a, b)
        one = frozenset({number})
        value = FlowValue(Rank.DATA, products=one, summands=summand(number), has_weight=a.has_weight or b.has_weight)
        if bool(a.probs) is not bool(b.probs):
            self._mask("value", self.tensors[second if a.probs else first])
            self.contexts.add(number)
            value = replace(value, context=one)
        else:
            self.factors[number] = a.sources | b.sources
            value = replace(value, products=one | a.products | b.products, scores=one | a.scores | b.scores)
        added_to = self.values[bias] if isinstance(bias, Node) else FlowValue()
        return self._sum(number, [(value, self.tensors[node]), (added_to, self.tensors.get(bias))])

    def _attention(self, number: int, node: Node, name: str) -> FlowValue | None:
        if "scaled_dot_product" in name and "attention" in name:
            operands: tuple[Any, ...] = node.args[:3]
            for role, operand in zip(("query", "key", "value"), operands, strict=True):
                self._mask(role, self.tensors[operand])
                self._read(self.values[operand])
            for extra in self._of([*node.args[3:], *node.kwargs.values()]):
                self._use(extra, "added to scores")
                for _, name, _ in extra.summands:
                    self.uses[name].add("added to scores")
            self._run(node, cut=operands)
            self.contexts.add(number)
            one = frozenset({number})
            return FlowValue(Rank.DATA, products=one, context=one, summands=summand(number), has_weight=True)
        if name in SOFTMAX:
            scores = self.values[node.args[0]]  # type: ignore[index]
            if scores.scores:
                for product in scores.scores - self.softmax_products:
                    for role, operand in zip(("query", "key"), self.operands[product], strict=True):
                        self._mask(role, operand)
                self.softmax_products |= scores.scores
                self._run(node, cut=[node.args[0]])  # type: ignore[list-item]
                value = self._opaque(number, [scores])
                return replace(value, sources=frozenset(), scores=frozenset(), probs=frozenset({number}))
        return None

    def _mask(self, role: str, operand: Tensor) -> None:
        """Record the entries of the parameters that have a gradient from a tensor."""
        if not operand.requires_grad:
            return
        leaves = [(name, p) for name, p in self.leaves.items() if p.requires_grad]
        direction = torch.randn(operand.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(operand)
        gradients = torch.autograd.grad(operand, [p for _, p in leaves], direction, retain_graph=True, allow_unused=True)
        for (name, _), gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and bool((gradient != 0).any()):
                mask = self.masks[name].get(role)
                self.masks[name][role] = gradient != 0 if mask is None else mask | (gradient != 0)

    # -- everything else ---------------------------------------------------------------------------------------------------

    def _other(self, number: int, node: Node, name: str) -> FlowValue:
        inputs = self._of([node.args, node.kwargs])
        value = joined(inputs)
        if name in EMPTY:
            return FlowValue()
        if name in NORMS:
            return self._norm(number, node, name)
        if name in LOOKUPS:
            table = self.values[node.args[0]]  # type: ignore[index]
            self._use(table, "lookup")
            return replace(table, rank=Rank.ROWS, summands=summand(number))
        if name in CHOICES and inputs[0].is_weight:
            if value.rank is not Rank.DATA:  # by a constant index: another arrangement of the parameter
                return inputs[0]
            self._use(inputs[0], "chosen")
            return replace(inputs[0], rank=Rank.ROWS)
        if name in ROUTING:
            self.routers |= value.sources.union(*(self.factors.get(product, frozenset()) for product in value.products))
        if name in RESHAPING and inputs:
            cut = frozenset({number} if name in CUTS else ())
            pieces = frozenset((at, of, cuts | cut) for at, of, cuts in inputs[0].summands)
            return replace(inputs[0], rank=value.rank, summands=pieces)
        if name in SUMS:
            self._run(node)
            nodes = [n for n in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
            return self._sum(number, [(self.values[n], self.tensors[n]) for n in nodes if n in self.values])
        weights, data = [v for v in inputs if v.is_weight], [v for v in inputs if v.rank is Rank.DATA]
        if not data and {v.rank for v in weights} >= {Rank.WEIGHT, Rank.ROWS}:  # rows of one table, and a whole parameter
            data = [v for v in weights if v.rank is Rank.ROWS]
            weights = [v for v in weights if v.rank is Rank.WEIGHT]
        if name in SCALINGS:
            for gate in data:
                if not gate.context and any(factor.context for factor in data):
                    self.gates |= gate.sources
        if weights and data:
            return self._with_weights(number, name, weights, data, value)
        if name in JOINS - TOTALS:
            self.sums.joins[number] = value.summands
        is_linear = name in TOTALS or (name in SCALINGS and sum(bool(v.summands) for v in inputs) == 1)
        return value if is_linear else self._opaque(number, inputs)

    def _norm(self, number: int, node: Node, name: str) -> FlowValue:
        for place, use in zip(NORMS[name], ("gain", "norm bias"), strict=True):
            if place is not None and place < len(node.args):
                for value in self._of([node.args[place]]):
                    self._use(value, use)
        self.gains.add(number)
        value = self._opaque(number, [self.values[node.args[0]]])  # type: ignore[index]
        return replace(value, rank=Rank.DATA, params=frozenset())

    def _with_weights(
        self, number: int, name: str, weights: list[FlowValue], data: list[FlowValue], value: FlowValue
    ) -> FlowValue:
        """Return the provenance of an operation, no product or sum of tensors, on parameters and activations."""
        use = "sink" if any(v.scores for v in data) else "joined"
        for weight in weights:
            if name in SCALINGS:
                self._use(weight, "gain" if weight.rank is Rank.WEIGHT else "lookup")
            else:
                self._use(weight, use if name in JOINS else "other")
        if name in SCALINGS:
            self.gains.add(number)
            for parameter in frozenset().union(*(weight.params for weight in weights)):
                self.scales[parameter].append(joined(data))
        if name in JOINS:
            self.sums.joins[number] = value.summands
        return replace(self._opaque(number, data), rank=Rank.DATA, params=frozenset())

    # -- sums --------------------------------------------------------------------------------------------------------------

    def _read(self, *values: FlowValue) -> None:
        """Record the summands of a value before an operation other than a sum reads it."""
        for value in values:
            self.sums.read(value.summands)

    def _opaque(self, number: int, inputs: Sequence[FlowValue]) -> FlowValue:
        """Return the provenance of an operation's result as a single summand."""
        self._read(*inputs)
        value = joined(inputs)
        self.sums.sources[number] = value.sources
        return replace(value, summands=summand(number)) if value.rank is Rank.DATA or value.summands else value

    def _sum(self, number: int, terms: Sequence[tuple[FlowValue, Any]]) -> FlowValue:
        """Return the provenance of a sum. Whatever the order, its parameters, as any of its terms, are summands."""
        value = joined(v for v, _ in terms)
        if value.rank <= Rank.WEIGHT:
            return value
        activations = []
        for v, x in terms:
            if v.rank is Rank.WEIGHT or (v.rank is Rank.ROWS and self._of_experts(v, value.sources)):
                for name in v.params:
                    self.vectors[number, name] = _is_vector(x)
                    value = replace(value, rank=Rank.DATA, summands=value.summands | summand(number, name))
            elif v.rank is not Rank.CONSTANT and x.is_floating_point():
                activations.append(v)
        params = value.params if value.rank < Rank.DATA else frozenset()
        context = value.context if all(v.context for v in activations) else frozenset()  # else a residual was added
        return replace(value, params=params, context=context)

    def _of_experts(self, bias: FlowValue, sources: Ids) -> bool:
        return any(self.multiplications[n].expert and self._is_stacked(name, n) for name in bias.params for n in sources)

    def _is_stacked(self, bias: str, number: int) -> bool:
        """Whether a parameter has a row for each of the stacked weights of a multiplication."""
        p, weights = self.leaves[bias], self.multiplications[number].weight
        return p.ndim == 2 and any(w.ndim == 3 and len(w) == len(p) for w in (self.leaves[name] for name in weights))

    def _fits(self, bias: str, number: int, is_vector: bool) -> bool:
        """Whether a parameter has the axes of the bias of a multiplication by a weight, or of a gain."""
        if is_vector or sum(n > 1 for n in self.leaves[bias].shape) <= 1:
            return True
        return number in self.multiplications and self._is_stacked(bias, number)

    def _assign(self) -> None:
        """Assign added parameters as biases to the multiplications or gains in the same contribution to sums."""
        for members in self.sums.contributions():
            makers = self.sums.makers(members)
            for number, name, _ in members:
                if name:
                    self._assign_one(name, self.vectors[number, name], makers)

    def _assign_one(self, name: str, is_vector: bool, makers: Ids) -> None:
        owners = {n for n in makers if n in self.multiplications or n in self.gains}
        if makers & self.softmax_products:
            self.uses[name].add("added to scores")
        elif makers & self.contexts and not owners:
            self.uses[name].add("added to values")
        elif owners and all(self._fits(name, n, is_vector) for n in owners):
            self.biases[name] |= owners
            if any(n in self.multiplications and self._is_stacked(name, n) for n in owners):
                self.uses[name].add("of an expert")
        else:
            self.uses[name].add("added")

    def _use(self, value: FlowValue, use: str) -> None:
        for name in value.params if value.is_weight else ():
            self.uses[name].add(use)


def _is_vector(x: Tensor) -> bool:
    """Whether a tensor, as it was broadcast, varies along one axis at most."""
    return sum(n > 1 and step != 0 for n, step in zip(x.shape, x.stride(), strict=True)) <= 1
