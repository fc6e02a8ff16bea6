"""Pooling, interpolation and cumulative sums: matrices along axes that torch's own operations tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operation_cases import check_closed_form

from derivations.axis_maps import AxisMaps

CASES = {
    "cumsum": lambda y: y.cumsum(1),
    "cumsum from the end": lambda y: torch.cumsum(y, -1),
    "avg_pool1d": lambda y: F.avg_pool1d(y, 2),
    "avg_pool1d, padded": lambda y: F.avg_pool1d(y, 3, 1, 1, count_include_pad=False),
    "avg_pool2d": lambda y: F.avg_pool2d(y[:, None], 2, 1),
    "avg_pool2d, padded": lambda y: F.avg_pool2d(y[:, None], (2, 3), (1, 2), 1, True, False),
    "avg_pool2d, padding counts": lambda y: F.avg_pool2d(y[:, None], (2, 3), 2, 1, True, True),
    "avg_pool3d": lambda y: F.avg_pool3d(y[None], (1, 2, 3)),
    "adaptive_avg_pool1d": lambda y: F.adaptive_avg_pool1d(y, 3),
    "adaptive_avg_pool2d": lambda y: F.adaptive_avg_pool2d(y[:, None], (2, 3)),
    "adaptive_avg_pool2d to one": lambda y: F.adaptive_avg_pool2d(y[:, None], 1),
    "local_response_norm": lambda y: F.local_response_norm(y, 2),
    "nearest": lambda y: F.interpolate(y[:, None], size=(5, 6)),
    "nearest, exact": lambda y: F.interpolate(y[:, None], size=(5, 3), mode="nearest-exact"),
    "linear": lambda y: F.interpolate(y, scale_factor=2, mode="linear"),
    "linear, aligned": lambda y: F.interpolate(y, size=7, mode="linear", align_corners=True),
    "bilinear": lambda y: F.interpolate(y[:, None], size=(5, 3), mode="bilinear"),
    "bicubic": lambda y: F.interpolate(y[:, None], scale_factor=(1.7, 1.3), mode="bicubic"),
    "bicubic, aligned": lambda y: F.interpolate(y[:, None], size=(5, 6), mode="bicubic", align_corners=True),
    "bicubic, antialiased": lambda y: F.interpolate(y[:, None], size=(2, 5), mode="bicubic", antialias=True),
    "trilinear": lambda y: F.interpolate(y[None, None], size=(3, 2, 5), mode="trilinear"),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_form(name):
    check_closed_form(CASES[name], AxisMaps)


def test_number_without_axes():
    check_closed_form(lambda y: y * y[0, 0, 0].cumsum(0))
