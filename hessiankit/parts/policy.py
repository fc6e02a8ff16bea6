"""What papers leave open, as stated choices: ties, biases, norms after the last block; and what a user overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hessiankit.errors import InputError
from hessiankit.parts.finding import Finding
from hessiankit.parts.part import TYPES, Part

_CHOICES = {"biases": ("layer", "Other"), "final_norm": ("Norm", "Other", "Head"), "tied": ("Emb", "Head")}


@dataclass(frozen=True)
class Policy:
    """The choices that :func:`hessiankit.parts.model_parts` documents."""

    biases: str = "layer"
    final_norm: str = "Norm"
    tied: str = "Emb"

    def __post_init__(self) -> None:
        for option, choices in _CHOICES.items():
            if (given := getattr(self, option)) not in choices:
                raise InputError(f"model_parts: {option} is {given!r}; expected one of {', '.join(map(repr, choices))}")

    def of_tie(self, findings: list[Finding]) -> list[Finding]:
        """Return the finding that counts for a parameter that is an embedding here and a head there."""
        types = {f.type for f in findings}
        if types == {"Emb", "Head"} and all(f.axis is None for f in findings):
            chosen = next(f for f in findings if f.type == self.tied)
            return [replace(chosen, reason=f"{chosen.reason}; tied to the {'head' if self.tied == 'Emb' else 'embedding'}")]
        return findings

    def of_part(self, part: Part, *, after: bool) -> Part:
        """Return a part with the type that the policy for biases and norms after the last block gives it."""
        if part.type == "Norm" and after:
            role = part.role if part.role.startswith("final ") else f"final {part.role}"
            return replace(part, type=self.final_norm, role=role)
        is_bias = part.role.endswith(" bias") and part.role not in ("norm bias", "relative position bias")
        if self.biases == "Other" and is_bias:
            return replace(part, type="Other")
        return part


def override(parts: Sequence[Part], overrides: Mapping[str, str] | None) -> tuple[Part, ...]:
    """Return the parts with the types that a user gives them.

    Args:
        parts: The parts; one of which nothing is known may have any type.
        overrides: Regular expression to type. Each is searched (``re.search``) in the part's name and in its parameter's.

    Raises:
        InputError: If a type is none, an expression is none or finds nothing, or two give one part different types.

    >>> part = Part("a.weight", "FFN", "up", 0, "...", 4)
    >>> override([part], {r"^a\\.": "VO"})[0].type
    'VO'
    """
    if not overrides:
        return tuple(parts)
    compiled = {}
    for pattern, block_type in overrides.items():
        if block_type not in TYPES:
            raise InputError(f"model_parts: overrides[{pattern!r}] is {block_type!r}; expected one of {', '.join(TYPES)}")
        try:
            compiled[pattern] = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError(f"model_parts: override {pattern!r} is no regular expression ({error})") from error
    unused = set(compiled)
    result = []
    for part in parts:
        hits = [pattern for pattern, rule in compiled.items() if rule.search(part.name) or rule.search(part.parameter)]
        unused -= set(hits)
        types = {overrides[pattern] for pattern in hits}
        if len(types) > 1:
            said = ", ".join(f"{pattern!r}: {overrides[pattern]!r}" for pattern in hits)
            raise InputError(f"model_parts: overrides give {part.name!r} different types ({said}); make them exclusive")
        result.append(replace(part, type=types.pop(), reason=f"override {hits[0]!r}") if hits else part)
    if unused:
        missed = ", ".join(repr(pattern) for pattern in overrides if pattern in unused)
        raise InputError(
            f"model_parts: override {missed} matches no part; expected a regular expression found in a parameter's name"
        )
    return tuple(result)
