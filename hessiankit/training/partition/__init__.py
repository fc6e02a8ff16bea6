"""Parts of a model: parameters, and slices of fused ones, each with one block type."""

from hessiankit.training.partition.fused import named_slices
from hessiankit.training.partition.part import TYPES, BlockTypes, Part
from hessiankit.training.partition.types import block_types, model_parts

__all__ = ["TYPES", "BlockTypes", "Part", "block_types", "model_parts", "named_slices"]
