"""A short run that measures the sharpness of each block type, for ratios that are measured rather than copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hessiankit.estimation import sharpness
from hessiankit.optim import measured_ratios
from hessiankit.tuning.experiment import RunSpec, Setting, model_of, one_thread, texts, training, warm_up_steps
from hessiankit.tuning.ratios import Ratios, ratios_of

BATCHES, DRAWS = 8, 8


@dataclass(frozen=True)
class Pilot:
    """Ratios from a measurement.

    Attributes:
        ratios: Factors by block type.
        sharpness: Mean sharpness (eq. 4) by block type, with its standard error.
        step: The step after which it was measured.
    """

    ratios: Ratios
    sharpness: dict[str, tuple[float, float]]
    step: int

    @property
    def order(self) -> str:
        """The block types from flat to sharp.

        >>> Pilot((), {"Norm": (2.0, 0.1), "Emb": (1.0, 0.1)}, 40).order
        'Emb < Norm'
        """
        return " < ".join(sorted(self.sharpness, key=lambda kind: self.sharpness[kind][0]))


def measure(setting: Setting, lr: float, seed: int) -> Pilot:
    """Train the baseline to the end of its warm-up, measure the sharpness there, and return the ratios that follow.

    The warm-up's end is where the paper switches from one learning rate to several (App. A.2). The sharpness is eq. (4) with
    labels drawn from the model, on batches of the training text that the run has not read.

    Args:
        setting: What all runs share.
        lr: The tuned baseline's.
        seed: A tuning seed.
    """
    step = max(1, warm_up_steps(setting))
    text, _ = texts(setting.text)
    with one_thread():
        model = model_of(setting, seed)
        for done in training(model, text, RunSpec(setting, lr, (), seed)):
            if done == step:
                break
        generator = torch.Generator().manual_seed(seed + 1)
        data = [text.batch(setting.batch_size, setting.length, generator) for _ in range(BATCHES)]
        report = sharpness(model, data, draws=DRAWS, seed=seed)
    found = {kind: (one.value, one.standard_error) for kind, one in report.types.items()}
    ratios = {kind: ratio.value for kind, ratio in measured_ratios(report).items()}
    return Pilot(ratios_of(ratios), found, step)
