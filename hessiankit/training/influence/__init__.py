"""Influence of training samples: what leaving one out does to the loss of a test sample, by a solution or by replay of a run."""

from hessiankit.training.influence.attribution import influence
from hessiankit.training.influence.recorded_run import RecordedRun
from hessiankit.training.influence.scores import Influence

__all__ = ["Influence", "RecordedRun", "influence"]
