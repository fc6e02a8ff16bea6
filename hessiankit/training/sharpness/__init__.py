"""Average sharpness of each block type with confidence intervals: squared gradients of labels drawn from the model."""

from hessiankit.training.sharpness.estimate import SharpnessEstimate
from hessiankit.training.sharpness.measure import sharpness
from hessiankit.training.sharpness.replicate import Replicates, joined, replicates
from hessiankit.training.sharpness.sharpness_report import Histogram, SharpnessReport, report_of

__all__ = [
    "Histogram",
    "Replicates",
    "SharpnessEstimate",
    "SharpnessReport",
    "joined",
    "replicates",
    "report_of",
    "sharpness",
]
