"""Findings on each parameter, or slice of it, from the flow of data through one run of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hessiankit.support.containers import arguments, map_tensors
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.torch_state import one_at_a_time, ordinary_path, preserved_state
from hessiankit.tracing.recording import record
from hessiankit.training.partition.findings import TYPE_OF_ROLE, UNKNOWN, Finding, segments_of, type_of, uncovered_segments
from hessiankit.training.partition.flow_reader import Run

_USES = (  # use of a parameter outside multiplications, type, role, reason; the first that applies
    ("lookup", "Emb", "embedding", "rows of it are looked up"),
    ("logit scale", "Head", "logit scale", "it multiplies the output of the head"),
    ("gain", "Norm", "gain", "it multiplies activations entry by entry"),
    ("norm bias", "Norm", "norm bias", "it is added to a norm's output"),
    ("sink", "Other", "attention sink", "it is joined to the scores of a softmax"),
    ("added to values", "VO", "value bias", "it is added to the output of attention"),
    ("added to scores", "Emb", "relative position bias", "it is added to the scores of a softmax"),
    ("joined", "Emb", "learned token", "it is joined to the activations"),
    ("added", "Emb", "position embedding", "it is added to activations, and is no bias"),
)
_ATTENTION = {
    "query": "what makes the queries of a softmax",
    "key": "what makes the keys of a softmax",
    "value": "what makes the values that attention averages",
}


@one_at_a_time
def flow(model: nn.Module, inputs: Any) -> dict[str, list[Finding]]:
    """Return the findings of one run of a model, by parameter name; parameters whose use is not recognised are left out.

    The model runs in evaluation mode, and its state is restored.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, bias=False)
    >>> [(f.role, f.segments) for f in flow(layer, torch.randn(1, 3, 4))["self_attn.in_proj_weight"]]
    [('query', ((0, 4),)), ('key', ((4, 8),)), ('value', ((8, 12),))]
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    args, kwargs = map_tensors(torch.Tensor.detach, arguments(inputs))
    data = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        with preserved_state(model), ordinary_path():
            # with no parameter to differentiate, an autograd.Function runs as the operations that its forward consists of
            leaves = [p.requires_grad_(False) for p in model.parameters()]
            recording = record(lambda: _main_output(model(*args, **kwargs)), [*leaves, *data], {})
            run = Run(recording, parameters, data)
    except HessiankitError:
        raise
    except Exception as error:  # whatever the model raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"model_parts: the model does not run on inputs= ({reason}); pass a tensor, a tuple of positional or a mapping of "
            "keyword arguments that the model takes, or leave inputs= out"
        ) from error
    reader = _FlowFindings(run)
    findings = {name: list(reader.of(name, p)) for name, p in parameters.items()}
    return {name: entries for name, entries in findings.items() if entries}


def _main_output(outputs: Any) -> Tensor:
    """Return the logits, or the first tensor, of what a model returns."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    leaves = outputs.values() if isinstance(outputs, dict) else _pytree.tree_leaves(outputs)
    for x in leaves:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    raise InputError(f"model_parts: on inputs= the model returned {type(outputs).__name__}; expected a tensor among its outputs")


class _FlowFindings:
    """The findings that one run supports."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.weights = {name for m in run.multiplications.values() for name in m.weight}
        self.consumers: dict[int, set[int]] = defaultdict(set)
        for number, m in run.multiplications.items():
            for source in m.read.sources - run.residual:
                self.consumers[source].add(number)

    def of(self, name: str, p: Tensor) -> Iterator[Finding]:
        """Yield the findings on one parameter."""
        is_weight, is_bias, uses = name in self.weights, name in self.run.biases, self.run.uses.get(name, set())
        if "chosen" in uses and "of an expert" not in uses:
            uses = uses | {"lookup"}
        if not is_weight and not is_bias:
            findings = [Finding(t, role, f"flow: {why}") for use, t, role, why in _USES if use in uses]
            yield from findings[:1]
            return
        if "lookup" in uses:
            yield Finding("Emb", "embedding", "flow: rows of it are looked up")
        yield from self._of_product(name, p, " bias" if is_bias and not is_weight else "")

    def _of_product(self, name: str, p: Tensor, suffix: str) -> Iterator[Finding]:
        slices = list(_slices(p, self.run.masks.get(name, {}), suffix))
        yield from slices
        rest = uncovered_segments(slices, p)
        if not rest:
            return
        axis = slices[0].axis if slices else None
        numbers = {n for n, m in self.run.multiplications.items() if name in m.weight} | self.run.biases.get(name, set())
        results = [of_one for n in sorted(numbers) if (of_one := self._of_multiplication(n)) is not None]
        types = {block_type for block_type, *_ in results}
        if len(types) == 1:
            block_type, role, why, certain = results[0]
            yield Finding(block_type, role + suffix, f"flow: {why}", axis, () if axis is None else rest, certain)
        elif types and suffix:
            reason = f"flow: it is added to a sum of {' and '.join(sorted(types))}"
            yield Finding(UNKNOWN, "bias", reason, axis, () if axis is None else rest, certain=False)

    def _of_multiplication(self, number: int) -> tuple[str, str, str, bool] | None:
        """Return type, role, reason and certainty of a gain, or of a multiplication that makes no queries, keys or values."""
        if number in self.run.gains:
            return "Norm", "norm", "it is added to a norm's output", True
        run, m = self.run, self.run.multiplications[number]
        readers = self.consumers.get(number, set()) - self.run.routers
        if m.read.context:
            return "VO", "output", "it reads attention's output", True
        if number in run.routers:
            return "Other", "router", "the largest of its outputs, or of products of them, are taken", True
        if number in run.gates:
            return "Other", "attention gate", "what it makes multiplies attention's output entry by entry", False
        if number in run.output.sources and number not in run.residual:
            return "Head", "head", "the model's output comes from it, through no other weight or sum", False
        if number in run.residual and not m.read.has_weight and number not in run.product_factors:
            return "Emb", "input map", "it reads the inputs and begins the residual", False
        if self._is_down(number):
            return "FFN", "down", "its output goes to the residual, its input comes from another weight", False
        results = [self._made(reader) for reader in readers]
        if results and all(results):
            roles = sorted(frozenset().union(*results), key=list(_ATTENTION).index)
            role = roles[0] if len(roles) == 1 else "latent"
            return type_of(roles), role, f"it feeds weights that make {' and '.join(roles)}", False
        if readers and number not in run.product_factors and all(self._is_down(n) for n in readers):
            return "FFN", "up", "what it makes goes to a weight whose output goes to the residual", False
        return None

    def _made(self, number: int) -> frozenset[str]:
        """Return the roles among queries, keys and values that a multiplication produces."""
        weights = self.run.multiplications[number].weight
        return frozenset(role for name in weights for role in self.run.masks.get(name, {}))

    def _is_down(self, number: int) -> bool:
        m = self.run.multiplications[number]
        return number in self.run.residual and bool(m.read.sources - self.run.residual) and not m.read.products


def _slices(p: Tensor, masks: dict[str, Tensor], suffix: str) -> Iterator[Finding]:
    """Yield the query, key and value parts of a parameter: all of it, or segments along one axis."""
    if not masks:
        return
    for axis in range(p.ndim):
        lines = {role: _along(mask, axis) for role, mask in masks.items()}
        counts = torch.stack(list(lines.values())).sum(0)
        if int(counts.max()) <= 1 and (len(lines) > 1 or not bool(counts.bool().all())):
            for role, line in lines.items():
                why = f"flow: {_ATTENTION[role]}"
                yield Finding(TYPE_OF_ROLE[role], role + suffix, why, axis, tuple(segments_of(line)))
            return
    roles = sorted(masks, key=list(_ATTENTION).index)
    why = "flow: " + ", and ".join(_ATTENTION[role] for role in roles)
    yield Finding(type_of(roles), " and ".join(roles) + suffix, why)


def _along(mask: Tensor, axis: int) -> Tensor:
    return mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1)
