"""Depth diagnostics of The Curse of Depth: what each block of a model does to the stream, the loss and its curvature."""

from hessiankit.depth.angles import AngularDistances, angular_distance
from hessiankit.depth.blocks import Blocks
from hessiankit.depth.curvature import LayerCurvature
from hessiankit.depth.diagnostics import QUANTITIES, depth_diagnostics
from hessiankit.depth.jacobians import Jacobians
from hessiankit.depth.laws import GrowthLaws, Law, growth_laws
from hessiankit.depth.pruning import PruningDrop
from hessiankit.depth.report import DepthReport
from hessiankit.depth.stream import StreamStatistics

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
