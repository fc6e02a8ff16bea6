"""Learning rates for each block type of a transformer: parameter groups, schedules, and checks of the groups at every step."""

from hessiankit.training.optim.groups import ParameterGroups, blockwise_lr
from hessiankit.training.optim.ratios import PRESETS, Ratio, measured_ratios
from hessiankit.training.optim.schedules import BlockwiseSchedule, blockwise_schedule
from hessiankit.training.optim.steps import check_groups
from hessiankit.training.partition import TYPES, block_types

__all__ = [
    "PRESETS",
    "TYPES",
    "BlockwiseSchedule",
    "ParameterGroups",
    "Ratio",
    "block_types",
    "blockwise_lr",
    "blockwise_schedule",
    "check_groups",
    "measured_ratios",
]
