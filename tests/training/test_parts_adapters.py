"""Block types of adapters of peft, against tables by hand and against what each entry moves."""

from __future__ import annotations

from fnmatch import fnmatchcase

import peft
import pytest
import torch
from peft_cases import ADAPTED, INPUTS, gpt2, llama, lora, moved
from torch import nn

import hessiankit as hk
from hessiankit.training.partition import model_parts

D = 8
FUSED = {"QK": 2 * D, "VO": D}
ROWS = {kind: 2 * n for kind, n in FUSED.items()}  # of B, at rank 2
C_ATTN = {"*c_attn*.lora_A.default*": "Other", "*c_attn*.lora_B.default*": ROWS}
TYPES = {
    "LoRA of fused weights": C_ATTN,
    "LoRA of all weights": {**C_ATTN, "*attn.c_proj*": "VO", "*mlp*": "FFN"},
    "LoRA with biases": {**C_ATTN, "*c_attn*.bias": FUSED},
    "LoRA with modules to save": {**C_ATTN, "*ln_f*": "Norm", "*lm_head*": "Head"},
    "LoRA with a tied head to save": {**C_ATTN, "*wte*": "Emb"},
    "DoRA of fused weights": {**C_ATTN, "*lora_magnitude_vector*": FUSED},
    "LoRA over a merged one": {**C_ATTN, "*attn.c_proj*": "VO", "*mlp*": "FFN"},
    "two adapters": {
        **C_ATTN,
        "*c_attn*.lora_A.second*": "Other",
        "*c_attn*.lora_B.second*": {kind: 3 * n for kind, n in FUSED.items()},
        "*attn.c_proj*": "VO",
        "*mlp*": "FFN",
    },
    "LoRA of Llama": {"*q_proj*": "QK", "*v_proj*": "VO", "*o_proj*": "VO", "*down_proj*": "FFN", "*embed_tokens*": "Emb"},
    "DoRA of Llama": {"*q_proj*": "QK", "*v_proj*": "VO"},
    "biases of B of fused weights": {"*lora_A*": "Other", "*lora_B*.weight": ROWS, "*lora_B*.bias": FUSED},
    "biases of B": {"*q_proj*": "QK"},
}


def entries(model: nn.Module, **options: object) -> dict[str, dict[str, int]]:
    """The entries of each parameter by type."""
    found: dict[str, dict[str, int]] = {}
    for part in model_parts(model, **options):
        of = found.setdefault(part.parameter, {})
        of[part.type] = of.get(part.type, 0) + part.size
    return found


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("inputs", [None, INPUTS], ids=["modules", "flow"])
def test_types_of_adapters_are_those_of_what_they_adapt(name, inputs):
    model = ADAPTED[name]()
    trained, found = [n for n, p in model.named_parameters() if p.requires_grad], entries(model, inputs=inputs)
    assert trained
    for parameter in trained:
        (wanted,) = {str(t): t for pattern, t in TYPES[name].items() if fnmatchcase(parameter, pattern)}.values()
        size = model.get_parameter(parameter).numel()
        assert found[parameter] == (wanted if isinstance(wanted, dict) else {wanted: size}), parameter


@pytest.mark.parametrize("name", ADAPTED)
def test_every_entry_has_one_type_and_the_base_has_that_without_adapters(name):
    model = ADAPTED[name]()
    parts = model_parts(model)
    assert [p.parameter for p in parts if not p.segments or p.segments[0][0] == 0] == [n for n, _ in model.named_parameters()]
    assert sum(p.size for p in parts) == sum(p.numel() for p in model.parameters())
    plain = {
        p.name: (p.type, p.role, p.layer) for p in model_parts(llama() if "Llama" in name or name == "biases of B" else gpt2())
    }
    held = {p.name.replace("base_model.model.", "").replace(".base_layer", ""): (p.type, p.role, p.layer) for p in parts}
    for part, said in plain.items():
        if part in held:
            assert held[part] == said
    assert {p.layer for p in parts if ".h." in p.parameter or ".layers." in p.parameter} == {
        said[2] for said in plain.values()
    } - {None}


@pytest.mark.parametrize("dora", [False, True])
def test_a_slice_moves_the_outputs_of_its_type_alone(dora):
    model = lora(gpt2(), "c_attn", use_dora=dora)
    layer = model.base_model.model.transformer.h[1].attn.c_attn
    x = torch.randn(3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    before = layer(x)
    columns = {"query": slice(0, D), "key": slice(D, 2 * D), "value": slice(2 * D, 3 * D)}
    seen = []
    for part in model_parts(model):
        if ".h.1.attn.c_attn.lora" not in part.parameter:
            continue
        p = model.get_parameter(part.parameter)
        kept = p.detach().clone()
        with torch.no_grad():
            for view in part.of(p):
                view.add_(0.1)
            after = layer(x)
            p.copy_(kept)
        roles = [role for role, at in columns.items() if not torch.equal(before[:, at], after[:, at])]
        assert roles == (list(columns) if part.role == "latent" else [part.role])
        seen.append(part.role)
    assert sorted(seen) == sorted(["latent", *columns, *(columns if dora else ())])


def test_merging_changes_no_type():
    model = lora(gpt2(), "c_attn", "c_fc")
    before = dict(hk.block_types(model, inputs=INPUTS))
    model.merge_adapter()
    assert dict(hk.block_types(model, inputs=INPUTS)) == before
    model.unmerge_adapter()
    unloaded = model.merge_and_unload()
    assert dict(hk.block_types(unloaded)) == dict(hk.block_types(gpt2()))


def test_slices_of_adapted_weights_have_names():
    found = hk.named_slices(lora(gpt2(), "c_attn"))
    layer = "base_model.model.transformer.h.0.attn"
    assert found[f"{layer}.key.weight"] == f"{layer}.c_attn.base_layer.weight[:, 8:16]"
    assert len(found) == len(hk.named_slices(gpt2()))


def test_other_tuners_have_the_type_of_what_they_adapt():
    model = moved(peft.get_peft_model(llama(), peft.LoHaConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj"])))
    kinds = {"q_proj": "QK", "o_proj": "VO", "up_proj": "FFN"}
    for part in model_parts(model):
        if "hada" in part.parameter:
            assert part.type == next(kind for name, kind in kinds.items() if name in part.parameter)
    scaled = moved(
        peft.get_peft_model(gpt2(), peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True))
    )
    name = next(n for n, _ in scaled.named_parameters() if "ia3_l" in n)
    assert entries(scaled)[name] == FUSED
