"""Depth diagnostics of The Curse of Depth: the effect of each block on the stream, the loss and its curvature."""

from hessiankit.training.depth.blocks import Blocks
from hessiankit.training.depth.curvature import Jacobians, LayerCurvature
from hessiankit.training.depth.diagnostics import QUANTITIES, DepthReport, depth_diagnostics
from hessiankit.training.depth.laws import GrowthLaws, Law, growth_laws
from hessiankit.training.depth.replacement import replace_norms
from hessiankit.training.depth.stream import AngularDistances, PruningDrop, StreamStatistics, angular_distance

__all__ = [
    "QUANTITIES",
    "AngularDistances",
    "Blocks",
    "DepthReport",
    "GrowthLaws",
    "Jacobians",
    "Law",
    "LayerCurvature",
    "PruningDrop",
    "StreamStatistics",
    "angular_distance",
    "depth_diagnostics",
    "growth_laws",
    "replace_norms",
]
