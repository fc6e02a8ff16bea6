"""Learning rates for each block type of a transformer: parameter groups, schedules, and checks of the groups at every step."""

from hessiankit.optim.groups import ParameterGroups, blockwise_lr
from hessiankit.optim.ratios import PRESETS, Ratio, measured_ratios
from hessiankit.optim.schedules import BlockwiseSchedule, blockwise_schedule
from hessiankit.optim.steps import check_groups
from hessiankit.partition import TYPES, block_types

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
