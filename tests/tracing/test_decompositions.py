"""Operations taken apart, and the layers of real models that are written with them: exact, and with nothing left over."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, draw
from torch import Tensor

import hessiankit as hk
from derivations.linear import Add, Linear, MatMul
from hessiankit.engine.jacobians import find_sites
from hessiankit.tracing.decompositions import COMPOSITE, DECOMPOSITIONS, aten
from hessiankit.tracing.trace import Trace


def applied(f: object, *inputs: Tensor, **shapes: tuple[int, ...]) -> Trace:
    module = Formula(f, **shapes)
    return hk.trace_module(lambda p, *x: torch.func.functional_call(module, p, x).sum(), dict(module.named_parameters()), inputs)


def test_weight_and_bias_of_addmm_are_one_site():
    traced = applied(lambda s, x: torch.addmm(s.b, x, s.W), draw(3, 4), W=(4, 2), b=(2,))
    assert [type(a.primitive) for a in traced.applications[:2]] == [MatMul, Add]
    assert [[jacobian.parameter for jacobian in site.jacobians] for site in find_sites(traced).values() if site.jacobians] == [
        ["W", "b"]
    ]


@pytest.mark.parametrize(("equation", "shape", "kind"), [("...i,ij->...j", (4, 2), MatMul), ("bli,ji->blj", (2, 4), Linear)])
def test_a_weight_in_einsum_is_a_site(equation, shape, kind):
    traced = applied(lambda s, x: torch.einsum(equation, x, s.W), draw(2, 3, 4), W=shape)
    assert isinstance(traced.applications[0].primitive, kind)
    assert len(find_sites(traced)) == 1


def test_a_piece_of_what_stands_still_does_not_move():
    traced = applied(lambda s, x: torch.mul(*torch.broadcast_tensors(x @ s.W, x[:1, :1])), draw(3, 4), W=(4, 2))
    assert [a.name.rpartition("_")[0] or a.name for a in traced.applications][:2] == ["matmul", "getitem"]
    assert len(traced.applications) == 4  # product, one broadcast, product, sum


def test_what_torch_takes_apart_exists():
    split = (n.partition(".") for n in COMPOSITE)
    known = [getattr(getattr(aten, packet, None), overload or "default", None) for packet, _, overload in split]
    assert all(operation in DECOMPOSITIONS for operation in known if operation is not None)
    assert len([operation for operation in known if operation is not None]) >= len(COMPOSITE) - 2
