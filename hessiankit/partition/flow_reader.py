"""One run of the model, operation by operation: multiplications by weights, and the operands of attention.

The run is repeated with gradients cut at the input of every multiplication by a weight. The entries of a weight that then have
a gradient from the queries of a softmax are its query entries, for any layout of a fused weight, and through norms, rotary
embeddings and reshapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.tracing.graph import Node, Recording, map_nodes


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
SUMS = _words("add sub rsub __iadd__")
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


def attention_of(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the queries, keys and values of a fused attention operation, or None."""
    return args[:3] if "scaled_dot_product" in name and "attention" in name else None


def storage(x: Any) -> int | None:
    """Return the address of a tensor's memory, or None."""
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) and x.numel() else None


Ids: TypeAlias = frozenset[int]


class Rank(IntEnum):
    """Dependence of a tensor: on nothing, parameters, rows of parameters chosen by an index, or the model's inputs."""

    CONSTANT = 0
    WEIGHT = 1
    CHOSEN = 2
    DATA = 3


@dataclass(frozen=True)
class FlowValue:
    """The provenance of one tensor.

    Attributes:
        rank: Its dependence.
        params: Names of the parameters that it is computed from; empty for data.
        sources: Multiplications by weights that it comes from with no other such multiplication between.
        products: Products of two activations since the last multiplication by a weight.
        scores: Those products that no softmax has followed.
        probs: Softmaxes of such scores that it comes from.
        context: Applications of attention whose output it is part of.
        producer: The multiplication by a weight, or the gain, whose output it is up to reshaping.
        weighted: Whether any multiplication by a weight precedes it.
    """

    rank: Rank = Rank.CONSTANT
    params: frozenset[str] = frozenset()
    sources: Ids = frozenset()
    products: Ids = frozenset()
    scores: Ids = frozenset()
    probs: Ids = frozenset()
    context: Ids = frozenset()
    producer: tuple[str, int] | None = None
    weighted: bool = False

    @property
    def is_weight(self) -> bool:
        """Whether it depends on parameters, or rows of them, alone."""
        return self.rank in (Rank.WEIGHT, Rank.CHOSEN)


def joined(values: Iterable[FlowValue]) -> FlowValue:
    """Return the provenance of a tensor computed from others.

    >>> joined([FlowValue(Rank.DATA, sources=frozenset({1})), FlowValue(Rank.DATA, sources=frozenset({2}))]).sources
    frozenset({1, 2})
    """
    given = list(values)
    if not given:
        return FlowValue()
    rank = max(v.rank for v in given)
    both = {
        name: frozenset().union(*(getattr(v, name) for v in given))
        for name in ("sources", "products", "scores", "probs", "context")
    }
    params = frozenset().union(*(v.params for v in given)) if rank < Rank.DATA else frozenset()
    producer = given[0].producer if len(given) == 1 else None
    return FlowValue(rank, params, producer=producer, weighted=any(v.weighted for v in given), **both)


def added(left: FlowValue, right: FlowValue) -> FlowValue:
    """Return the provenance of a sum of two activations; with a residual added it no longer counts as attention's output.

    >>> attention = FlowValue(Rank.DATA, context=frozenset({3}))
    >>> added(attention, FlowValue(Rank.DATA)).context, added(attention, attention).context
    (frozenset(), frozenset({3}))
    """
    found = joined((left, right))
    if left.context and right.context:
        return found
    return replace(found, context=frozenset())


@dataclass
class Multiplication:
    """One multiplication by a weight: its weight, bias and input, and whether the data choose among stacked weights."""

    weight: frozenset[str]
    bias: frozenset[str]
    read: FlowValue
    expert: bool


@dataclass
class RunRecord:
    """Uses of the parameters in one run.

    Attributes:
        multiplications: By the number of the operation.
        masks: Query, key and value entries of a parameter, by its name and the role.
        uses: Other uses of a parameter, by its name: ``"gain"``, ``"lookup"``, ``"joined"``, ...
        residual: Multiplications whose output is added to other activations.
        routers: Multiplications of whose output the largest entries are taken.
        product_factors: Multiplications whose output is a factor of a product of activations.
        output: Provenance of the model's output.
    """

    multiplications: dict[int, Multiplication] = field(default_factory=dict)
    masks: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    uses: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    residual: set[int] = field(default_factory=set)
    routers: set[int] = field(default_factory=set)
    product_factors: set[int] = field(default_factory=set)
    output: FlowValue = field(default_factory=FlowValue)


def read(recording: Recording, parameters: Mapping[str, Tensor], data: Sequence[Tensor]) -> RunRecord:
    """Return the uses of the parameters in a recorded run.

    Args:
        recording: Of a function of the parameters, then the data (:func:`hessiankit.tracing.recording.record`).
        parameters: Their values by name, in that order.
        data: The other arguments.
    """
    return _RunReader(recording, parameters, data).record


class _RunReader:
    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor], data: Sequence[Tensor]) -> None:
        self.record = RunRecord()
        self.leaves = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in parameters.items()}
        self.known: dict[Node, Any] = {}
        self.values: dict[Node, FlowValue] = {}
        self.operands: dict[int, tuple[Tensor, Tensor]] = {}  # factors of a product of activations, before they were cut
        self.seen: set[int] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.at: dict[int, list[Node]] = defaultdict(list)  # nodes by memory
        given = iter([*self.leaves.items(), *(("", x) for x in data)])
        with torch.enable_grad():
            for number, node in enumerate(recording.graph.nodes):
                if node.op == "placeholder":
                    name, self.known[node] = next(given)
                    self.values[node] = FlowValue(Rank.WEIGHT, frozenset({name})) if name else FlowValue(Rank.DATA)
                elif node.op == "get_attr":
                    self.known[node], self.values[node] = recording.constants[str(node.target)], FlowValue()
                elif node.op == "segment":
                    self.known[node], self.values[node] = recording.unseen[node].root.detach(), joined(self._of(node.args))
                elif node.op == "output":
                    self.record.output = joined(self._of(torch.utils._pytree.tree_leaves(node.args)))
                    continue
                elif node.target is not torch._C._set_grad_enabled:
                    self.values[node] = self._operation(number, node)
                self._remember(node)

    def _remember(self, node: Node) -> None:
        if (place := storage(self.known.get(node))) is not None:
            self.at[place].append(node)

    def _of(self, nodes: Any) -> list[FlowValue]:
        return [self.values[n] for n in torch.utils._pytree.tree_leaves(nodes) if isinstance(n, Node) and n in self.values]

    def _operation(self, number: int, node: Node) -> FlowValue:
        """Run one operation, and return the provenance of its result."""
        name, writes = name_of(node)
        value = self._product(number, node, name) or self._attention(number, node, name) or self._other(number, node, name)
        self._run(node)
        if isinstance(x := self.known[node], Tensor) and not x.is_floating_point():
            value = FlowValue(value.rank)  # an index or a mask carries no provenance
        if writes:  # every view of that memory changes
            for other in self.at.get(storage(self.known[node]) or 0, []):
                self.values[other] = joined((self.values[other], value))
            value = joined((value, *self._of(node.args[:1])))
        return value

    def _run(self, node: Node, cut: Sequence[Node] = ()) -> None:
        if node in self.known:
            return
        args, kwargs = map_nodes(lambda n: self.known[n].detach() if n in cut else self.known[n], (node.args, node.kwargs))
        self.known[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    # -- products ----------------------------------------------------------------------------------------------------------

    def _product(self, number: int, node: Node, name: str) -> FlowValue | None:
        found = factors(name, node.args)
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

    def _by_weight(self, number: int, node: Node, weight: Node, other: Node, bias: Any) -> FlowValue:
        record, read_from = self.record, self.values[other]
        if read_from.is_weight:
            self._use(read_from, "joined")
        chosen = self.values[weight].rank is Rank.CHOSEN
        if chosen:
            self._use(self.values[weight], "of an expert")  # not an embedding
        added_to = self.values[bias] if isinstance(bias, Node) else FlowValue()
        biases = added_to.params if added_to.is_weight else frozenset()
        expert = chosen or name_of(node)[0] == "_grouped_mm"
        record.multiplications[number] = Multiplication(self.values[weight].params, biases, read_from, expert)
        self._run(node, cut=[other, *([bias] if isinstance(bias, Node) and added_to.rank is Rank.DATA else [])])
        return FlowValue(Rank.DATA, sources=frozenset({number}), producer=("weight", number), weighted=True)

    def _activations(self, number: int, node: Node, first: Node, second: Node, bias: Any) -> FlowValue:
        a, b = self.values[first], self.values[second]
        self.operands[number] = (self.known[first], self.known[second])
        self._run(node, cut=[first, second])
        for name in self._of([bias]):
            self._use(name, "added to scores")
        weighted, products = a.weighted or b.weighted, frozenset({number})
        if bool(a.probs) is not bool(b.probs):
            self._mask("value", self.known[second if a.probs else first])
            return FlowValue(Rank.DATA, products=products, context=products, weighted=weighted)
        self.record.product_factors |= a.sources | b.sources
        return FlowValue(
            Rank.DATA, products=products | a.products | b.products, scores=products | a.scores | b.scores, weighted=weighted
        )

    def _attention(self, number: int, node: Node, name: str) -> FlowValue | None:
        made_of = attention_of(name, node.args)
        if made_of is not None:
            for role, operand in zip(("query", "key", "value"), made_of, strict=True):
                self._mask(role, self.known[operand])
            for extra in self._of([*node.args[3:], *node.kwargs.values()]):
                self._use(extra, "added to scores")
            self._run(node, cut=made_of)
            return FlowValue(Rank.DATA, products=frozenset({number}), context=frozenset({number}), weighted=True)
        if name in SOFTMAX:
            scores = self.values[node.args[0]]  # type: ignore[index]
            if scores.scores:
                for product in scores.scores - self.seen:
                    for role, operand in zip(("query", "key"), self.operands[product], strict=True):
                        self._mask(role, operand)
                self.seen |= scores.scores
                self._run(node, cut=[node.args[0]])  # type: ignore[list-item]
                return replace(scores, sources=frozenset(), scores=frozenset(), probs=frozenset({number}), producer=None)
        return None

    def _mask(self, role: str, operand: Tensor) -> None:
        """Record the entries of the parameters that have a gradient from a tensor."""
        if not operand.requires_grad:
            return
        leaves = [(name, p) for name, p in self.leaves.items() if p.requires_grad]
        direction = torch.randn(operand.shape, generator=self.generator, dtype=torch.float64).to(operand)
        found = torch.autograd.grad(operand, [p for _, p in leaves], direction, retain_graph=True, allow_unused=True)
        for (name, _), gradient in zip(leaves, found, strict=True):
            if gradient is not None and bool((gradient != 0).any()):
                before = self.record.masks[name].get(role)
                self.record.masks[name][role] = gradient != 0 if before is None else before | (gradient != 0)

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
            return replace(table, rank=Rank.CHOSEN, producer=None)
        if name in CHOICES and inputs[0].is_weight:
            if value.rank is not Rank.DATA:  # by a constant index: another arrangement of the parameter
                return replace(inputs[0], producer=None)
            self._use(inputs[0], "chosen")
            return replace(inputs[0], rank=Rank.CHOSEN, producer=None)
        if name in ROUTING:
            self.record.routers |= value.sources
        if name in RESHAPING and inputs:
            return replace(inputs[0], rank=value.rank) if value.rank is not inputs[0].rank else inputs[0]
        weights, data = [v for v in inputs if v.is_weight], [v for v in inputs if v.rank is Rank.DATA]
        if not data and {v.rank for v in weights} >= {Rank.WEIGHT, Rank.CHOSEN}:  # rows of one table, and a whole parameter
            data = [v for v in weights if v.rank is Rank.CHOSEN]
            weights = [v for v in weights if v.rank is Rank.WEIGHT]
        if weights and data:
            return self._with_weights(number, name, weights, data, value)
        if len(data) == 2 and name in SUMS:
            self.record.residual |= data[0].sources ^ data[1].sources
            return added(*data)
        return replace(value, producer=None)

    def _norm(self, number: int, node: Node, name: str) -> FlowValue:
        for place, use in zip(NORMS[name], ("gain", "norm bias"), strict=True):
            if place is not None and place < len(node.args):
                for value in self._of([node.args[place]]):
                    self._use(value, use)
        return replace(self.values[node.args[0]], rank=Rank.DATA, params=frozenset(), producer=("gain", number))  # type: ignore[index]

    def _with_weights(
        self, number: int, name: str, weights: list[FlowValue], data: list[FlowValue], value: FlowValue
    ) -> FlowValue:
        """Return the provenance of an operation, not a matrix product, on parameters and activations."""
        producer = None
        for weight in weights:
            if weight.rank is Rank.CHOSEN and name in SUMS:
                kind, source = data[0].producer or ("", -1)
                if kind == "weight" and self.record.multiplications[source].expert:
                    self._use(weight, "of an expert")
                    self._added(weight, data[0])
                continue  # other rows that were looked up begin the residual
            if name in SCALINGS:
                self._use(weight, "gain" if weight.rank is Rank.WEIGHT else "lookup")
                producer = ("gain", number)
            elif name in SUMS:
                self._added(weight, data[0])
                producer = data[0].producer
            elif name in JOINS:
                self._use(weight, "sink" if any(v.scores for v in data) else "joined")
            else:
                self._use(weight, "other")
        return replace(value, rank=Rank.DATA, params=frozenset(), producer=producer)

    def _added(self, weight: FlowValue, data: FlowValue) -> None:
        if data.scores:
            self._use(weight, "added to scores")
        elif data.producer is None or not self._fits(weight, data.producer):
            self._use(weight, "added")
        elif data.producer[0] == "gain":
            self._use(weight, "norm bias")
        else:
            self.record.multiplications[data.producer[1]].bias |= weight.params

    def _fits(self, bias: FlowValue, producer: tuple[str, int]) -> bool:
        """Whether parameters have the number of axes of a bias: one, or two beside stacked experts."""
        kind, number = producer
        weights = self.record.multiplications[number].weight if kind == "weight" else frozenset()
        stacked = any(self.leaves[name].ndim == 3 for name in weights)
        return all(self.leaves[name].ndim <= (2 if stacked else 1) for name in bias.params)

    def _use(self, value: FlowValue, use: str) -> None:
        for name in value.params if value.is_weight else ():
            self.record.uses[name].add(use)
