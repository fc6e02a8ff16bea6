"""Names of the parts of fused weights: which there are, what is read of a Hessian by them, and what is not listed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fused_cases import FUSED, ROLES, SEPARATE, SelfAttention, build, gpt2, hugging_face, imported, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from hessiankit.engine.problem.selection import parse_part, rows_of_part, select
from hessiankit.partition.fused import named_slices


@pytest.mark.parametrize("case", [*FUSED, *SEPARATE])
def test_heads_are_all_of_a_role_and_parts_all_of_a_parameter(case: str) -> None:
    """Every entry once; a head moves its own role alone, as tests/partition/test_fused.py sees, and so does the role."""
    module, _ = build(case)

    def entries(heads: bool) -> dict[tuple[str, str], list[Tensor]]:
        found: dict[tuple[str, str], list[Tensor]] = {}
        for part, index in named_slices(module, heads=heads).items():
            name, parsed = parse_part(index)
            rows_of = rows_of_part(module.get_parameter(name).shape, parsed)
            found.setdefault((name, re.sub(r"head_\d+\.", "", part)), []).append(rows_of)
        return found

    whole, by_head = entries(heads=False), entries(heads=True)
    assert any(name.endswith("weight") for name, _ in whole) is (case in FUSED)
    for key, (of_role,) in whole.items():
        assert torch.equal(torch.cat(by_head[key]).sort().values, of_role.sort().values), key
    for name in {name for name, _ in by_head}:
        positions = [rows_of for (own, _), cut in by_head.items() if own == name for rows_of in cut]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(module.get_parameter(name).numel())), name
    slices = named_slices(module, heads=True)
    assert set(select("who", module, slices.values())) == {name for name, _ in by_head}


def test_names_read_well() -> None:
    assert named_slices(gpt2()[0]) == {
        "h.0.attn.query.weight": "h.0.attn.c_attn.weight[:, 0:16]",
        "h.0.attn.key.weight": "h.0.attn.c_attn.weight[:, 16:32]",
        "h.0.attn.value.weight": "h.0.attn.c_attn.weight[:, 32:48]",
        "h.0.attn.query.bias": "h.0.attn.c_attn.bias[0:16]",
        "h.0.attn.key.bias": "h.0.attn.c_attn.bias[16:32]",
        "h.0.attn.value.bias": "h.0.attn.c_attn.bias[32:48]",
    }


def test_a_size_in_which_the_layers_of_a_config_differ_is_that_of_the_module() -> None:
    class Config:
        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' is a per-layer attribute")

    model = gpt2()[0]
    expected = named_slices(model, heads=True)
    for module in model.modules():
        module.config = Config()
    assert named_slices(model, heads=True) == expected


def test_a_part_of_several_slices() -> None:
    slices = named_slices(hugging_face("GPTNeoX")[0])
    whole = "layers.0.attention.query_key_value.weight"
    assert slices["layers.0.attention.key.weight"] == f"{whole}[4:8; 16:20; 28:32; 40:44]"


@pytest.mark.parametrize("case", list(SEPARATE)[1:])  # the first has a fused bias all the same
def test_separate_layers_are_no_fused_weight(case: str) -> None:
    assert named_slices(build(case)[0]) == {}


def test_a_block_of_a_hessian_between_two_parts() -> None:
    torch.manual_seed(0)
    module, x, target = SelfAttention(4, 2).double(), rows(2, 3, 4), rows(2, 3, 4).flip(0)
    slices = named_slices(module)
    wholes = {name: p.detach() for name, p in module.named_parameters()}

    def loss(query: Tensor, key: Tensor) -> Tensor:
        weight = torch.cat([query, key, wholes["c_attn.weight"][8:]])
        return F.mse_loss(torch.func.functional_call(module, wholes | {"c_attn.weight": weight}, x), target)

    parts = wholes["c_attn.weight"][:8].split(4)
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        expected = torch.autograd.functional.hessian(loss, tuple(parts))[0][1].reshape(16, 16)
    found = hk.hessian(module, x, target, params=[slices["query.weight"], slices["key.weight"]])
    assert found.names == ("c_attn.weight",)
    block = found.block(slices["query.weight"], slices["key.weight"])
    torch.testing.assert_close(block, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def test_tied_parameters_go_by_the_listed_name() -> None:
    first, second = SelfAttention(8, 4), SelfAttention(8, 4)
    second.c_attn.weight = first.c_attn.weight
    assert named_slices(nn.Sequential(first, second))["1.key.weight"] == "0.c_attn.weight[8:16]"
    assert set(named_slices(nn.Sequential(first, first))) == {f"0.{r}.{k}" for r in ROLES for k in ("weight", "bias")}


def odd(**parts: Any) -> nn.Module:
    module = nn.Module()
    for name, value in parts.items():
        setattr(module, name, value)
    return module


UNKNOWN: dict[str, nn.Module] = {
    "no heads": odd(qkv=nn.Linear(8, 24)),
    "no width of a head": odd(qkv=nn.Linear(8, 24), num_heads=4),
    "key heads that do not divide the heads": odd(qkv=nn.Linear(2, 30), num_heads=4, num_kv_heads=3, head_dim=3),
    "sizes that do not fit": odd(qkv=nn.Linear(8, 20), num_heads=4, head_dim=2),
    "qkv_proj of unknown order": odd(qkv_proj=nn.Linear(8, 24), num_attention_heads=4, head_dim=2),
    "a convolution": odd(qkv=nn.Conv2d(8, 24, 1), num_heads=4, head_dim=2),
    "not a number of heads": odd(qkv=nn.Linear(8, 24), num_heads=True, head_dim=8),
    "gate_up_proj alone": odd(gate_up_proj=nn.Linear(8, 24)),
    "gate_up_proj of another width": odd(gate_up_proj=nn.Linear(8, 24), down_proj=nn.Linear(8, 8)),
    "computed weight": nn.utils.parametrizations.weight_norm(nn.Linear(8, 24, bias=False)),
    "queries with their gates": odd(
        q_proj=nn.Linear(8, 16), k_proj=nn.Linear(8, 8), v_proj=nn.Linear(8, 8), num_heads=4, head_dim=2
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_not_listed(case: str) -> None:
    assert named_slices(UNKNOWN[case], heads=True) == {}


def test_a_library_that_orders_qkv_proj_in_its_own_way_is_not_listed() -> None:
    module, _ = hugging_face("MiniMax", attn_implementation="eager", layer_types=["linear_attention"])
    assert any("qkv_proj" in name for name, _ in module.named_parameters())
    assert {name for name in named_slices(module, heads=True) if ".self_attn." in name} == set()


def test_timms_layers_that_go_head_by_head_are_not_listed() -> None:
    _, tiny = imported("timm.models.tiny_vit", "Attention")
    _, maxxvit = imported("timm.models.maxxvit", "AttentionCl")
    for layer in (tiny(16, 4, num_heads=4, attn_ratio=1, resolution=(4, 4)), maxxvit(16, dim_head=4, head_first=True)):
        assert layer.qkv.weight.shape == (48, 16)
        assert named_slices(layer, heads=True) == {}


def test_a_computed_weight_is_not_listed() -> None:
    module = SelfAttention(8, 4)
    nn.utils.parametrizations.weight_norm(module.c_attn)
    assert set(named_slices(module)) == {f"{role}.bias" for role in ROLES}
