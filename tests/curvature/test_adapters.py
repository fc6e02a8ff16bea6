"""Hessians of models with adapters of peft: exact, of the adapters alone, and by every route that a plain model has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice
from model_zoo import checked
from peft_cases import ADAPTED, INPUTS, LABELS, gpt2, in_double, lora
from torch import Tensor, nn

import hessiankit as hk


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(**INPUTS).logits.flatten(0, 1), LABELS.flatten())


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ADAPTED)
def test_sub_hessian_of_all_adapters(name):
    model = in_double(ADAPTED[name]())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = gradient_twice(loss_of(model), list(trained.values()))
    H = hk.hessian(model, INPUTS, LABELS, loss="cross_entropy")
    assert H.names == tuple(trained)  # frozen parameters are constants
    assert H.fallbacks == ()
    assert error(H.matrix, expected) <= 1e-10
    operator = hk.hessian_operator(model, INPUTS, LABELS, loss="cross_entropy")
    assert error(operator.to_matrix(), expected) <= 1e-10
    diagonal = hk.hessian_diagonal(model, INPUTS, LABELS, loss="cross_entropy")
    assert error(torch.cat([x.flatten() for x in diagonal.values.values()]), expected.diagonal()) <= 1e-10


def test_adapters_by_type_of_block():
    model = lora(gpt2(), "c_attn", "c_fc")
    types = hk.block_types(model)
    H = hk.hessian(model, INPUTS, LABELS, loss="cross_entropy")
    exact = hk.sharpness(model, INPUTS, LABELS, kind="hessian").types
    for kind, one in exact.items():
        names = [p.name for p in types.of_type(kind) if model.get_parameter(p.parameter).requires_grad]
        diagonal = torch.cat([H.block(name, name).diagonal() for name in names])
        assert one.value == pytest.approx(float(diagonal.mean()), rel=1e-10)
    found = hk.spectrum(model, INPUTS, LABELS, loss="cross_entropy", k=2, by=types)
    assert float(found.eigenvalues[0]) == pytest.approx(float(H.eigvalsh()[-1]), rel=1e-8)


def test_check_and_bounds_of_a_layer_with_an_adapter():
    checked(lora(gpt2(n_layer=1), "c_attn"), INPUTS, LABELS, loss="cross_entropy")
    report = hk.check(lora(gpt2(n_layer=1), "c_attn", use_dora=True), INPUTS, LABELS, loss="cross_entropy")
    assert report  # DoRA holds the norm of its weight constant, which only central differences do not
    assert any("detach stops a gradient" in line for line in report.health_lines())
    layer = lora(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double(), "0", "2")
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    limits = hk.bounds(layer, x, torch.zeros(5, 2, dtype=torch.float64))
    assert not limits.violated
    assert limits.ratio("certified") < 1 + 1e-6


def test_precision_of_adapters_over_a_half_precision_base():
    import peft
    from peft_cases import config

    base = gpt2().bfloat16()
    model = peft.get_peft_model(base, config(base, "c_attn")).eval()  # adapters in float32
    H = hk.hessian(model, INPUTS, LABELS, loss="cross_entropy")
    assert H.matrix.dtype == torch.float32
    assert torch.isfinite(H.matrix).all()


BAD = {
    "dropout of the adapter": (
        lambda: lora(gpt2(), "c_attn", lora_dropout=0.1).train(),
        r"c_attn.lora_dropout.default' is a dropout layer \(p=0.1\) in training mode",
    ),
    "merged": (lambda: _merged(), "none of the parameters .*lora_A.* has an effect on the loss"),
    "unloaded": (lambda: lora(gpt2(), "c_attn").merge_and_unload(), "no parameters that require grad; call requires_grad_"),
}


def _merged() -> nn.Module:
    model = lora(gpt2(), "c_attn")
    model.merge_adapter()
    return model


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_operator, hk.hessian_diagonal])
def test_one_clear_error(call, case):
    make, message = BAD[case]
    with pytest.raises(hk.InputError, match=message):
        call(make(), INPUTS, LABELS, loss="cross_entropy")
