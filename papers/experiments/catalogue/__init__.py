"""Experiments of the four papers: every number of a preset with its place of print, and the sizes that run on one core.

A preset is put together of a recipe, which a paper's experiments share, a model and an arm, the method. ``paper`` has the
printed numbers. ``small`` and ``tiny`` have their own sizes and budgets, and the paper's methods. "Code" is the paper's released
code, where the text is silent; "ours" is a choice where both are.
"""

from __future__ import annotations

from typing import Any

from hessiankit.support.errors import InputError, unknown
from papers.experiments.catalogue import curse_of_depth, curvature_gap, hybridnorm, sharpness_disparity
from papers.experiments.catalogue.preset import Experiment, Model, Printed, at
from papers.experiments.spec import Spec

__all__ = [
    "EXPERIMENTS",
    "NO_RUN",
    "PRESETS",
    "Experiment",
    "Model",
    "Printed",
    "experiment_of",
    "name_of",
    "numbers_of",
    "slug",
    "specs",
]
PRESETS = ("paper", "small", "tiny")
EXPERIMENTS: dict[str, Experiment] = {
    **curse_of_depth.EXPERIMENTS, **hybridnorm.EXPERIMENTS, **sharpness_disparity.EXPERIMENTS, **curvature_gap.EXPERIMENTS,
}  # fmt: skip
"""Experiments by the name that ``python -m papers train`` takes: a paper, and a row of the ledger or its figure or table."""
NO_RUN = {
    "curse-of-depth/fig2": "weights of Qwen3-8B, DeepSeek-7B, LLaMA2-13B, BERT-Large: hessiankit.depth_diagnostics on them",
    "curse-of-depth/fig9": "weights of Qwen2.5-VL-7B: hessiankit.depth_diagnostics on them",
    "curse-of-depth/table2": "supervised fine-tuning of Table 1's models on Commonsense170K, then python -m papers evaluate",
    "hybridnorm/table1": "python -m papers evaluate on the models of hybridnorm/fig1",
    "hybridnorm/table2": "python -m papers evaluate on the models of hybridnorm/fig3",
    "hybridnorm/fig2": "a drawing of the blocks: hessiankit.blocks.PLACEMENTS",
    "sharpness-disparity/table1": "python -m papers evaluate on LLaMA (1.1B) of sharpness-disparity/fig4",
    "curvature-gap/fig1": "a drawing", "curvature-gap/fig2": "a drawing",
    "curvature-gap/table1": "numbers of the presets curvature-gap/mnist and curvature-gap/cifar",
    "hybridnorm/table6": "numbers of the presets", "hybridnorm/table7": "numbers of the presets",
    "sharpness-disparity/table3": "numbers of the presets", "sharpness-disparity/table4": "numbers of the presets",
}  # fmt: skip
"""Figures and tables that no run of this command makes, with the reason."""


def experiment_of(name: str) -> Experiment:
    """Return an experiment.

    Raises:
        InputError: There is none of this name.
    """
    if name in NO_RUN:
        raise InputError(f"train: {name} is no training run: {NO_RUN[name]}")
    if name not in EXPERIMENTS:
        raise unknown("train", "experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def name_of(spec: Spec) -> str | None:
    """Return the experiment that a run is of, by the run's name; None where it is of none.

    >>> (spec, _), *_ = specs("sharpness-disparity/fig5-c4", "tiny", seeds=(0, 1)).values()
    >>> name_of(spec)
    'sharpness-disparity/fig5-c4'
    """
    found = [name for name in EXPERIMENTS if spec.name.startswith(f"{name.replace('/', '-')}-")]
    return max(found, key=len, default=None)


def numbers_of(experiment: Experiment, size: str, arm: str) -> dict[str, Printed]:
    """Return the numbers of the paper's preset with their places."""
    method = at(experiment.shows, **experiment.arms[arm])
    return {**experiment.recipe.paper, **experiment.models[size].paper, **experiment.budget, **method}


def specs(
    name: str, preset: str = "small", *, seeds: tuple[int, ...] | None = None, **changes: Any
) -> dict[tuple[str, str], list[Spec]]:
    """Return the runs of an experiment, by model and method, one a seed; the paper's preset has one seed.

    Args:
        name: A key of :data:`EXPERIMENTS`.
        preset: A name in :data:`PRESETS`.
        seeds: Seeds; by default those of the experiment.
        changes: Attributes that are other than the preset's, such as ``steps`` or ``text``.

    >>> (spec, _), *_ = specs("curse-of-depth/table8", "tiny").values()
    >>> spec.arm, spec.size, spec.placement, spec.layers
    ('Pre-LN', '130M', 'pre', 4)
    """
    experiment = experiment_of(name)
    found = {}
    for size, model in experiment.models.items():
        for arm, method in experiment.arms.items():
            if preset == "paper":
                values = {key: number.value for key, number in numbers_of(experiment, size, arm).items()}
            else:
                values = {**experiment.recipe.small, **model.small, **experiment.small}
                if preset == "tiny":
                    values |= {**experiment.recipe.tiny, **model.tiny}
                values |= method
            values |= {"arm": arm, "size": size, **changes}
            label = f"{name.replace('/', '-')}-{slug(size)}-{slug(arm)}"
            chosen = seeds or ((0,) if preset == "paper" else experiment.seeds)
            found[size, arm] = [Spec(**{"name": f"{label}-{seed}", **values, "seed": seed}) for seed in chosen]
    return found


def slug(name: str) -> str:
    """Return a name as a part of a file's name.

    >>> slug("HybridNorm*"), slug("Pre-LN, scaled init")
    ('hybridnorm-star', 'pre-ln-scaled-init')
    """
    letters = (c if c.isalnum() or c in "-." else " " for c in name.replace("*", "-star").lower())
    return "-".join("".join(letters).split())
