"""Findings on a parameter from several routes, merged, and the policy for choices that papers leave open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import torch
from torch import Tensor, nn

from hessiankit.support.errors import InputError, check_name
from hessiankit.training.partition.part import TYPES, Part

TYPE_OF_ROLE = {
    "query": "QK",
    "key": "QK",
    "shared key": "QK",
    "value": "VO",
    "output": "VO",
    "gate": "FFN",
    "up": "FFN",
    "latent": "Other",
    "router": "Other",
    "attention sink": "Other",
}
"""Block type by role. A latent shared by keys and values, and a router, are none of the paper's types."""
_CHILDREN = {
    "query": "q q_proj query q_lin to_q wq w_q query_proj q_attn linear_q q_linear query_layer queries q_a_proj q_b_proj",
    "key": "k k_proj key k_lin to_k wk w_k key_proj linear_k k_linear key_layer keys",
    "value": "v v_proj value v_lin to_v wv w_v value_proj linear_v v_linear value_layer values",
}
ROLE_OF = {name: role for role, names in _CHILDREN.items() for name in names.split()}
"""Role by the name of a layer in an attention, in small letters."""


def type_of(roles: Iterable[str]) -> str:
    """Return the block type of a parameter with several roles: Other where their types differ."""
    types = {TYPE_OF_ROLE[role] for role in roles}
    return types.pop() if len(types) == 1 else "Other"


@dataclass(frozen=True)
class Finding:
    """Type and role of a parameter, or of a slice of it, by one route; the fields are those of a :class:`Part`.

    It is ``certain`` where module types or the flow of data imply it, so that a contradiction is an error, and not where only the
    place in the model, or a name, suggests it.
    """

    type: str
    role: str
    reason: str
    axis: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    certain: bool = True


@dataclass(frozen=True)
class Owner:
    """One owner of a parameter: the path of the module that holds it, that module, and the parameter's name in it.

    A tied parameter has several.
    """

    path: str
    module: nn.Module
    leaf: str

    @property
    def name(self) -> str:
        """The parameter's name through this owner."""
        return child_path(self.path, self.leaf)


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """Return the owners of every parameter, by its name in ``named_parameters()``, in that order.

    >>> first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> second.weight = first.weight
    >>> {name: [o.name for o in places] for name, places in owners(nn.Sequential(first, second)).items()}
    {'0.weight': ['0.weight', '1.weight']}
    """
    names = {id(p): name for name, p in model.named_parameters()}
    owners_of: dict[str, list[Owner]] = {name: [] for name in names.values()}
    for path, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners_of[names[id(p)]].append(Owner(path, module, leaf))
    return owners_of


def is_within(path: str, root: str) -> bool:
    """Whether a module's path is ``root`` or below it.

    >>> is_within("h.1.mlp", "h.1"), is_within("h.11", "h.1"), is_within("h", "")
    (True, False, True)
    """
    return not root or path == root or path.startswith(f"{root}.")


def child_path(path: str, leaf: str) -> str:
    """Return the path of a child."""
    return f"{path}.{leaf}" if path else leaf


def segments_of(line: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first, after last) of the runs of True.

    >>> list(segments_of(torch.tensor([True, True, False, True])))
    [(0, 2), (3, 4)]
    """
    edges = torch.diff(torch.nn.functional.pad(line.int(), (1, 1)))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    yield from zip(starts, ends, strict=True)


def uncovered_segments(findings: list[Finding], p: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the segments of a parameter that no finding covers, along their axis; ``((0, 1),)`` if there are no findings.

    >>> uncovered_segments([Finding("QK", "query", "", 0, ((1, 3),))], torch.ones(5, 2))
    ((0, 1), (3, 5))
    """
    if not findings:
        return ((0, 1),)
    if findings[0].axis is None:
        return ()
    free = torch.ones(p.shape[findings[0].axis], dtype=torch.bool, device="cpu")
    for first, stop in chain.from_iterable(f.segments for f in findings):
        free[first:stop] = False
    return tuple(segments_of(free))


CONFLICT, UNKNOWN = "!", "?"
"""Types of a part for which the modules and the flow of data contradict each other, and of one that is not recognised."""


def merged(inferences: list[Finding], structural: list[Finding], p: Tensor) -> list[Finding]:
    """Return the findings of the flow of data where there are any, completed by those of the modules.

    A certain finding of the modules precedes an inference of the flow. Two certain ones must have one type wherever they overlap;
    else the result is one finding of type :data:`CONFLICT` that names both.

    >>> import torch
    >>> norm, scale = Finding("Norm", "gain", "LayerNorm"), Finding("FFN", "up", "flow: ...")
    >>> merged([scale], [norm], torch.ones(2))[0].reason
    'by its module Norm (LayerNorm), by the flow of data FFN (...)'
    """
    if not inferences:
        return structural
    if structural and {f.type for f in structural + inferences} == {"Emb", "Head"}:  # of one parameter: it is tied
        return structural if len(structural) > 1 else [*structural, *(f for f in inferences if f.type != structural[0].type)]
    if not structural or not structural[0].certain:
        return _whole(inferences, structural, p)
    if not inferences[0].certain:
        return structural
    for one, rival in product(structural, [f for f in inferences if f.certain]):
        if one.type != rival.type and _overlap(one, rival):
            flow_reason = rival.reason.removeprefix("flow: ")
            reason = f"by its module {one.type} ({one.reason}), by the flow of data {rival.type} ({flow_reason})"
            return [Finding(CONFLICT, one.role, reason)]
    return [replace(f, reason=f"{f.reason}; the flow of data agrees") for f in structural]


def _whole(findings: list[Finding], rest: list[Finding], p: Tensor) -> list[Finding]:
    """Return findings that cover the whole parameter: the uncovered segments by ``rest``, or as type ``"?"``."""
    free, axis = uncovered_segments(findings, p), findings[0].axis
    if not free:
        return findings
    if rest and rest[0].axis is None:
        return [*findings, replace(rest[0], axis=axis, segments=free)]
    return [*findings, Finding(UNKNOWN, "", "what the flow of data leaves of it", axis, free)]


def _overlap(one: Finding, rival: Finding) -> bool:
    if one.axis is None or rival.axis is None or one.axis != rival.axis:
        return True
    return any(a < d and c < b for a, b in one.segments for c, d in rival.segments)


@dataclass(frozen=True)
class Policy:
    """The options of :func:`hessiankit.training.partition.model_parts`."""

    biases: str
    final_norm: str
    tied: str

    def __post_init__(self) -> None:
        check_name("model_parts", "biases", self.biases, ("layer", "Other"))
        check_name("model_parts", "final_norm", self.final_norm, ("Norm", "Other", "Head"))
        check_name("model_parts", "tied", self.tied, ("Emb", "Head"))

    def of_tie(self, findings: list[Finding]) -> list[Finding]:
        """Return the finding that applies to a parameter that is both an embedding and a head."""
        types = {f.type for f in findings}
        if types == {"Emb", "Head"} and all(f.axis is None for f in findings):
            finding = next(f for f in findings if f.type == self.tied)
            return [replace(finding, reason=f"{finding.reason}; tied to the {'head' if self.tied == 'Emb' else 'embedding'}")]
        return findings

    def of_part(self, part: Part, *, is_final: bool) -> Part:
        """Return a part with the type that the options for biases and final norms assign."""
        if part.type == "Norm" and is_final:
            role = part.role if part.role.startswith("final ") else f"final {part.role}"
            return replace(part, type=self.final_norm, role=role)
        is_bias = part.role.endswith(" bias") and part.role not in ("norm bias", "relative position bias")
        return replace(part, type="Other") if self.biases == "Other" and is_bias else part


def override(parts: Sequence[Part], overrides: Mapping[str, str] | None) -> tuple[Part, ...]:
    """Return the parts with the types of the user's overrides: regular expressions, searched in the part's and parameter's name.

    >>> part = Part("a.weight", "FFN", "up", 0, "...", 4)
    >>> override([part], {r"^a\\.": "VO"})[0].type
    'VO'
    """
    expressions, overrides = dict[str, re.Pattern[str]](), overrides or {}
    for pattern, block_type in overrides.items():
        if block_type not in TYPES:
            raise InputError(f"model_parts: overrides[{pattern!r}] is {block_type!r}; expected one of {', '.join(TYPES)}")
        try:
            expressions[pattern] = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError(f"model_parts: override {pattern!r} is no regular expression ({error})") from error
    unmatched = set(expressions)
    result = []
    for part in parts:
        hits = [pattern for pattern, rule in expressions.items() if rule.search(part.name) or rule.search(part.parameter)]
        unmatched -= set(hits)
        types = {overrides[pattern] for pattern in hits}
        if len(types) > 1:
            patterns = ", ".join(f"{pattern!r}: {overrides[pattern]!r}" for pattern in hits)
            raise InputError(f"model_parts: overrides give {part.name!r} different types ({patterns}); make them exclusive")
        result.append(replace(part, type=types.pop(), reason=f"override {hits[0]!r}") if hits else part)
    if unmatched:
        missed = ", ".join(repr(pattern) for pattern in overrides if pattern in unmatched)
        raise InputError(
            f"model_parts: override {missed} matches no part; expected a regular expression found in a parameter's name"
        )
    return tuple(result)
