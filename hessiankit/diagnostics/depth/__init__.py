"""Depth diagnostics of The Curse of Depth: the effect of each block on the stream, the loss and its curvature."""

from hessiankit.diagnostics.depth.blocks import Blocks
from hessiankit.diagnostics.depth.curvature import LayerCurvature
from hessiankit.diagnostics.depth.depth_report import DepthReport
from hessiankit.diagnostics.depth.diagnostics import QUANTITIES, depth_diagnostics
from hessiankit.diagnostics.depth.jacobians import Jacobians
from hessiankit.diagnostics.depth.laws import GrowthLaws, Law, growth_laws
from hessiankit.diagnostics.depth.pruning import PruningDrop
from hessiankit.diagnostics.depth.stream import AngularDistances, StreamStatistics, angular_distance

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
]
