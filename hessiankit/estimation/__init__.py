"""How sharp each block of a model is: labels drawn from the model, squared gradients, and how well that is known."""

from hessiankit.estimation.estimate import Estimate
from hessiankit.estimation.exact import exact_sharpness
from hessiankit.estimation.histogram import Histogram
from hessiankit.estimation.measure import sharpness
from hessiankit.estimation.replicate import Replicates, joined, replicates
from hessiankit.estimation.report import SharpnessReport, report_of

__all__ = [
    "Estimate",
    "Histogram",
    "Replicates",
    "SharpnessReport",
    "exact_sharpness",
    "joined",
    "replicates",
    "report_of",
    "sharpness",
]
