"""Parts of a preset: a recipe, which a paper's experiments share, models and methods, with the place of every printed number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Printed(NamedTuple):
    """A number with its place of print."""

    value: Any
    place: str


Numbers = Mapping[str, Printed]
"""Attribute of a :class:`~papers.experiments.spec.Spec` -> its number."""


@dataclass(frozen=True)
class Recipe:
    """Numbers that the experiments of a paper share.

    Attributes:
        paper: Printed numbers.
        small: Attributes of small runs, whatever the model.
        tiny: Attributes of tiny runs, on top of ``small``.
        data: Data of the paper.
    """

    paper: Numbers
    small: Mapping[str, Any]
    tiny: Mapping[str, Any]
    data: str


@dataclass(frozen=True)
class Model:
    """A model of a paper.

    Attributes:
        paper: Printed numbers.
        parameters: Printed number of parameters, and its place; None where there is none.
        why: Row of the ledger on a count that differs.
        small: Attributes of small runs.
        tiny: Attributes of tiny runs.
        within: Relative difference from the print that rounding explains.
    """

    paper: Numbers
    parameters: Printed | None = None
    why: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    within: float = 0.01


@dataclass(frozen=True)
class Experiment:
    """One experiment: methods on models.

    Attributes:
        shows: Figures and tables of the paper that it makes.
        recipe: Numbers that the paper's experiments share.
        models: The models by the paper's names.
        arms: Attributes of each method, by the paper's names.
        budget: Printed numbers of this experiment on top of the models'.
        small: Attributes of its small runs on top of the models'.
        figure: Figure that draws it.
        seeds: Seeds of small runs.
    """

    shows: str
    recipe: Recipe
    models: Mapping[str, Model]
    arms: Mapping[str, Mapping[str, Any]]
    budget: Numbers = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    figure: str = "trained_arms"
    seeds: tuple[int, ...] = (0, 1)


def at(place: str, **numbers: Any) -> dict[str, Printed]:
    """Return numbers that are printed at one place."""
    return {name: Printed(value, place) for name, value in numbers.items()}


TINY = {"d_model": 16, "heads": 2, "length": 16, "batch_size": 4, "steps": 30, "windows": 8}
"""Sizes of all tiny language models."""
