"""Spectra, steps and norms by neuron, head, layer, ...: calls of the core, with words for these partitions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  # names of the examples in the docstrings of the core's calls
from torch import nn  # noqa: F401

from hessiankit.curvature import frobenius
from hessiankit.curvature.suboperators import BY
from hessiankit.landscape import critical, spectra
from hessiankit.support.errors import check_name
from hessiankit.training.by_partition.partitions import heads, layers, members, modules, neurons, translated, types

WORDS = {"neuron": neurons, "head": heads, "module": modules, "layer": layers, "type": types}


def partition_of(caller: str, by: Any) -> Any:
    """Return the partition of a word or of block types; other arguments unchanged."""
    if isinstance(by, str) and by not in BY:
        check_name(caller, "by", by, (*BY, *WORDS))
        return WORDS[by]
    if isinstance(by, Mapping):
        from hessiankit.training.partition import BlockTypes

        if isinstance(by, BlockTypes):  # of the whole model, where the operator may have only some of its parameters
            return lambda _, names: members(by.parts, names, lambda part: part.type)
    return by


if TYPE_CHECKING:  # checkers and the reference show the calls of the core
    from hessiankit.curvature.frobenius import frobenius_norms as frobenius_norms
    from hessiankit.landscape.critical import critical_sharpness as critical_sharpness
    from hessiankit.landscape.spectra import spectrum as spectrum
else:
    critical_sharpness = translated(__name__, critical.critical_sharpness, "by", partial(partition_of, critical.WHO))
    frobenius_norms = translated(__name__, frobenius.frobenius_norms, "by", partial(partition_of, frobenius.WHO))
    spectrum = translated(__name__, spectra.spectrum, "by", partial(partition_of, spectra.WHO))
