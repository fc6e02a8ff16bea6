"""What a model consists of: parameters, and slices of fused ones, each with one block type."""

from hessiankit.parts.part import TYPES, Part
from hessiankit.parts.table import BlockTypes
from hessiankit.parts.types import block_types, model_parts

__all__ = ["TYPES", "BlockTypes", "Part", "block_types", "model_parts"]
