"""Extremes, sorting, scattering, padding, pooling, interpolation, cumulative sums: entries that are chosen, put in places or mixed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import draw
from operation_cases import check_closed_form

from derivations.axis_maps import AxisMaps
from derivations.indexing import Take
from derivations.pooling import Extreme
from derivations.scattering import AddAt, TakeAmong

OTHER, MASK = draw(2, 3, 4, seed=13), torch.tensor([True, False, False, True])
INDEX = torch.tensor([[[1, 0, 2, 1]], [[0, 0, 1, 2]]])
TWICE = torch.tensor([[[1, 0, 2, 1], [1, 1, 1, 1]], [[0, 0, 1, 2], [2, 1, 0, 0]]])
PAIRS = (torch.tensor([0, 1]), torch.tensor([2, 0]))
ROWS = torch.tensor([1, 0, 1])

CASES = {
    "max along": (Take, lambda y: y.max(1)[0]),
    "max along, kept": (Take, lambda y: y.max(dim=-1, keepdim=True).values),
    "min along": (Take, lambda y: y.min(-1)[0]),
    "median along": (Take, lambda y: y.median(1)[0]),
    "kthvalue": (Take, lambda y: y.kthvalue(2, 1)[0]),
    "cummax": (Take, lambda y: y.cummax(1)[0]),
    "topk": (Take, lambda y: y.topk(2)[0]),
    "topk along": (Take, lambda y: y.topk(2, dim=1, largest=False)[0]),
    "weights of a router": (Take, lambda y: (lambda v: v / v.sum(-1, keepdim=True))(y.softmax(-1).topk(2, -1)[0])),
    "sort": (Take, lambda y: y.sort()[0]),
    "sort, descending": (Take, lambda y: y.sort(dim=1, descending=True)[0]),
    "msort": (Take, lambda y: y.msort()),
    "gather by argmax": (Take, lambda y: y.gather(-1, y.argmax(-1, keepdim=True))),
    "max of all": (Extreme, torch.max),
    "min of all": (Extreme, torch.min),
    "median of all": (Extreme, torch.median),
    "amax": (Extreme, lambda y: y.amax(1)),
    "amax over several": (Extreme, lambda y: y.amax((0, 2), keepdim=True)),
    "amax with ties": (Extreme, lambda y: torch.cat([y[:, :1], y[:, :1]], 1).amax(1)),
    "amin": (Extreme, lambda y: y.amin(-1)),
    "aminmax": (Extreme, lambda y: torch.aminmax(y, dim=1)[1]),
    "scatter": (TakeAmong, lambda y: (OTHER * y).scatter(1, INDEX, y[:, :1])),
    "scatter a number": (TakeAmong, lambda y: y.scatter(1, INDEX, 0.5)),
    "index_copy": (TakeAmong, lambda y: y.index_copy(1, torch.tensor([2, 0]), OTHER[:, :2] * y[:, 1:])),
    "index_fill": (TakeAmong, lambda y: y.index_fill(1, torch.tensor([1]), 0.3)),
    "index_put": (TakeAmong, lambda y: y.index_put(PAIRS, y[0, :2].sin())),
    "index_put, one value for all": (TakeAmong, lambda y: y.index_put((y > 0,), y[0, 0, 0].exp())),
    "index_put, adding": (AddAt, lambda y: y.index_put(PAIRS, y[0, :2].sin(), accumulate=True)),
    "masked_scatter": (TakeAmong, lambda y: y.masked_scatter(MASK, y.sin())),
    "slice_scatter": (TakeAmong, lambda y: torch.slice_scatter(y, OTHER[:, :1] * y[:, 1:2], 1, 0, 1)),
    "select_scatter": (TakeAmong, lambda y: torch.select_scatter(y, y[:, 0].sin(), 1, 2)),
    "diagonal_scatter": (TakeAmong, lambda y: torch.diagonal_scatter(y, y[:, 0, :3].sin(), 0, 1, 2)),
    "scatter_add": (AddAt, lambda y: (OTHER * y).scatter_add(1, TWICE, y[:, :2])),
    "scatter_reduce": (AddAt, lambda y: y.scatter_reduce(1, INDEX, y[:, :1].sin(), "sum")),
    "index_add": (AddAt, lambda y: y.new_zeros(2, 5, 4).index_add(1, ROWS, y)),
    "index_add with a factor": (AddAt, lambda y: y.index_add(-1, torch.tensor([1, 0]), y[:, :, :2], alpha=2)),
    "index_add in place": (AddAt, lambda y: torch.zeros(2, 5, 4).double().index_add_(1, ROWS, y)),
    "masked_select": (Take, lambda y: y.masked_select(MASK)),
    "index by its own mask": (Take, lambda y: y[y > 0]),
    "index by where": (Take, lambda y: y[torch.where(y > 0)]),
    "pad": (TakeAmong, lambda y: F.pad(y, (1, 2, 0, 1))),
    "pad and cut": (TakeAmong, lambda y: F.pad(y, (1, -1), value=0.7)),
    "pad, reflect": (Take, lambda y: F.pad(y[None], (1, 2, 1, 1), mode="reflect")),
    "pad, replicate": (Take, lambda y: F.pad(y, (1, 2), mode="replicate")),
    "pad, circular": (Take, lambda y: F.pad(y, (1, 2), mode="circular")),
    "diag": (TakeAmong, lambda y: torch.diag(y[0, 0])),
    "diag_embed": (TakeAmong, lambda y: torch.diag_embed(y, 1)),
    "unfold": (TakeAmong, lambda y: F.unfold(y[:, None], (2, 2), padding=1)),
    "fold": (AddAt, lambda y: F.fold(y.reshape(2, 4, 3), (2, 4), (2, 2))),
    "fold, padded": (AddAt, lambda y: F.fold(y.reshape(1, 4, 6), (3, 2), (2, 2), padding=(0, 1))),
    "max_pool1d": (Take, lambda y: F.max_pool1d(y, 2)),
    "max_pool2d": (Take, lambda y: F.max_pool2d(y[:, None], 2, 1, 1)),
    "adaptive_max_pool2d": (Take, lambda y: F.adaptive_max_pool2d(y[:, None], (2, 2))),
    "pixel_shuffle": (Take, lambda y: F.pixel_shuffle(y.reshape(2, 4, 3, 1), 2)),
    "pixel_unshuffle": (Take, lambda y: F.pixel_unshuffle(y.reshape(1, 3, 2, 4), 2)),
    "channel_shuffle": (Take, lambda y: F.channel_shuffle(y.reshape(2, 4, 3, 1), 2)),
    "rot90": (Take, lambda y: torch.rot90(y, 1, (1, 2))),
    "fliplr": (Take, torch.fliplr),
    "trace": (Take, lambda y: torch.trace(y[0])),
    "cumsum": (AxisMaps, lambda y: y.cumsum(1)),
    "cumsum from the end": (AxisMaps, lambda y: torch.cumsum(y, -1)),
    "avg_pool1d": (AxisMaps, lambda y: F.avg_pool1d(y, 2)),
    "avg_pool1d, padded": (AxisMaps, lambda y: F.avg_pool1d(y, 3, 1, 1, count_include_pad=False)),
    "avg_pool2d": (AxisMaps, lambda y: F.avg_pool2d(y[:, None], 2, 1)),
    "avg_pool2d, padded": (AxisMaps, lambda y: F.avg_pool2d(y[:, None], (2, 3), (1, 2), 1, True, False)),
    "avg_pool2d, padding counts": (AxisMaps, lambda y: F.avg_pool2d(y[:, None], (2, 3), 2, 1, True, True)),
    "avg_pool3d": (AxisMaps, lambda y: F.avg_pool3d(y[None], (1, 2, 3))),
    "adaptive_avg_pool1d": (AxisMaps, lambda y: F.adaptive_avg_pool1d(y, 3)),
    "adaptive_avg_pool2d": (AxisMaps, lambda y: F.adaptive_avg_pool2d(y[:, None], (2, 3))),
    "adaptive_avg_pool2d to one": (AxisMaps, lambda y: F.adaptive_avg_pool2d(y[:, None], 1)),
    "local_response_norm": (AxisMaps, lambda y: F.local_response_norm(y, 2)),
    "nearest": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 6))),
    "nearest, exact": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 3), mode="nearest-exact")),
    "linear": (AxisMaps, lambda y: F.interpolate(y, scale_factor=2, mode="linear")),
    "linear, aligned": (AxisMaps, lambda y: F.interpolate(y, size=7, mode="linear", align_corners=True)),
    "bilinear": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 3), mode="bilinear")),
    "bicubic": (AxisMaps, lambda y: F.interpolate(y[:, None], scale_factor=(1.7, 1.3), mode="bicubic")),
    "bicubic, aligned": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 6), mode="bicubic", align_corners=True)),
    "bicubic, antialiased": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(2, 5), mode="bicubic", antialias=True)),
    "trilinear": (AxisMaps, lambda y: F.interpolate(y[None, None], size=(3, 2, 5), mode="trilinear")),
    "cumsum of a number": (None, lambda y: y * y[0, 0, 0].cumsum(0)),
}


def aminmax_has_a_derivative() -> bool:
    """Not in torch 2.6."""
    try:
        torch.aminmax(torch.ones(2, requires_grad=True)).max.backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_closed_form(name):
    kind, operation = CASES[name]
    if name == "aminmax" and not aminmax_has_a_derivative():
        pytest.skip("autograd of this torch has none to compare with")
    check_closed_form(operation, kind)


def test_experts_by_their_tokens():
    """Dispatch as mixtures of experts do it: top-k weights, the tokens of each expert, and a sum at their places."""

    def experts(y: torch.Tensor) -> torch.Tensor:
        rows = y.flatten(0, 1)
        weights, chosen = rows.softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for expert in range(4):
            token, place = torch.where(chosen == expert)
            out = out.index_add(0, token, torch.tanh(rows[token] * (1 + expert)) * weights[token, place, None])
        return out

    check_closed_form(experts, AddAt)
