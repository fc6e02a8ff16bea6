"""Approximations of curvature matrices, exact blocks of layers and of block types among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch  # noqa: F401  # names of the examples in the docstring of the core's call
from torch import nn  # noqa: F401

from hessiankit.training.by_partition.partitions import blocks, translated, types

PARTITIONS = {"layer": blocks, "type": types}

if TYPE_CHECKING:  # checkers and the reference show the call of the core
    from hessiankit.curvature.approximating.approximations import approximations as approximations
else:
    from hessiankit.curvature import approximating

    approximations = translated(
        __name__, approximating.approximations, "partitions", lambda arguments: PARTITIONS if arguments is None else arguments
    )
