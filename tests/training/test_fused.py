"""Named parts of fused weights: a change of one part may move what the module itself takes for it, and nothing else.

What a module takes for its queries, keys and values is recorded where it hands them to torch's attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fused_cases import FUSED, ROLES, SEPARATE, SelfAttention, build, gpt2, hugging_face, imported, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from hessiankit.request.selection import parse_part, rows_of_part, select
from hessiankit.training.partition.fused import named_slices

Recorded = dict[str, Tensor]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, tuple[Any, ...]], Recorded]:
    """What a module hands to torch's attention, (batch, heads, tokens, width) each."""
    seen: list[Recorded] = []
    original = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append({"query": query.clone(), "key": key.clone(), "value": value.clone()})
        return original(query, key, value, *args, **kwargs)

    def run(module: nn.Module, inputs: tuple[Any, ...]) -> Recorded:
        seen.clear()
        module(*inputs)  # with gradients: without them torch's layers take a path that fuses everything
        assert len(seen) == 1
        return {role: value.detach() for role, value in seen[0].items()}

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return run


@contextmanager
def perturbed(module: nn.Module, index: str) -> Iterator[nn.Module]:
    """Add to one part of one parameter, for a while."""
    name, parsed = parse_part(index)
    parameter = module.get_parameter(name)
    kept = parameter.detach().clone()
    with torch.no_grad():
        rows = rows_of_part(parameter.shape, parsed)
        parameter.view(-1)[rows] += torch.linspace(0.2, 0.3, len(rows)).to(parameter)  # a norm of the head would drop a constant
    yield module
    with torch.no_grad():
        parameter.copy_(kept)


def moved_heads(module: nn.Module, index: str, before: Recorded, observe: Callable[[], Recorded]) -> dict[str, set[int]]:
    """The heads of queries, keys and values, (batch, heads, tokens, width) each, that a change of one part moves."""
    with perturbed(module, index):
        after = observe()
    return {r: {h for h in range(x.shape[1]) if not torch.equal(x[:, h], after[r][:, h])} for r, x in before.items()}


def only(role: str, heads: set[int]) -> dict[str, set[int]]:
    return {other: heads if other == role else set() for other in ROLES}


def check_heads(module: nn.Module, observe: Callable[[], Recorded]) -> int:
    """Every head moves itself alone; return how many parts there are."""
    before = observe()
    slices = {name: index for name, index in named_slices(module, heads=True).items() if ".head_" in name}
    counts = {role: sum(f"{role}.head_" in name and name.endswith("weight") for name in slices) for role in ROLES}
    assert counts["query"] == before["query"].shape[1]
    assert counts["key"] == counts["value"]
    for name, index in slices.items():
        role, head = name.split(".")[-3], int(name.split(".")[-2].removeprefix("head_"))
        copies = before[role].shape[1] // counts[role]  # a key head may be handed over once for each of its queries
        expected = only(role, set(range(head * copies, (head + 1) * copies)))
        assert moved_heads(module, index, before, observe) == expected, name
    return len(slices)


@pytest.mark.parametrize("case", [*FUSED, *SEPARATE])
def test_a_head_moves_itself_only(case: str, record: Callable[..., Recorded]) -> None:
    module, inputs = build(case)
    check_heads(module, lambda: record(module, inputs))


def test_latent_attention(record: Callable[..., Recorded]) -> None:
    latent = {"kv_lora_rank": 5, "q_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3}
    module, inputs = hugging_face("DeepseekV3", **latent, first_k_dense_replace=1)
    module = module.double().eval()
    before = record(module, inputs)
    slices = {name.split(".", 3)[3]: index for name, index in named_slices(module, heads=True).items() if ".mlp." not in name}
    assert len(slices) == 2 * 4 + 2
    everything = {0, 1, 2, 3}
    for name, index in slices.items():
        role, *head, _ = name.split(".")
        mine = {int(head[0].removeprefix("head_"))} if head else everything
        expected = only("key" if role == "shared_key" else role, mine)
        if role == "latent":
            expected = {"query": set(), "key": everything, "value": everything}
        assert moved_heads(module, index, before, lambda: record(module, inputs)) == expected, name


def test_gate_and_up_of_stacked_experts() -> None:
    module, inputs = hugging_face("Mixtral", num_key_value_heads=2, num_local_experts=3, experts_implementation="eager")
    module = module.double().eval()
    experts, gates = module.layers[0].mlp.experts, []
    experts.act_fn.register_forward_pre_hook(lambda _, x: gates.append(x[0].detach()))
    slices = {n.split(".")[-2]: i for n, i in named_slices(module).items() if ".experts." in n}
    whole = "layers.0.mlp.experts.gate_up_proj"
    assert slices == {"gate": f"{whole}[:, 0:24]", "up": f"{whole}[:, 24:48]"}
    before = module(*inputs)[0]
    for role, index in slices.items():
        first = list(gates)
        gates.clear()
        with perturbed(module, index):
            after = module(*inputs)[0]
        assert all(torch.equal(x, y) for x, y in zip(first, gates, strict=True)) is (role == "up")
        assert not torch.equal(before, after)
        gates[:] = first


def test_gate_and_up() -> None:
    module, inputs = hugging_face("Phi3", num_key_value_heads=2, head_dim=4)
    module = module.double().eval()
    mlp = module.layers[0].mlp
    seen: dict[str, Tensor] = {}
    mlp.activation_fn.register_forward_pre_hook(lambda _, x: seen.update(gate=x[0].detach()))
    mlp.down_proj.register_forward_pre_hook(lambda _, x: seen.update(product=x[0].detach()))
    slices = {n.split(".")[-2]: i for n, i in named_slices(module, heads=True).items() if ".mlp." in n}
    assert slices == {r: f"layers.0.mlp.gate_up_proj.weight[{i}]" for r, i in (("gate", "0:24"), ("up", "24:48"))}
    module(*inputs)
    before = dict(seen)
    with perturbed(module, slices["up"]):
        module(*inputs)
    assert torch.equal(before["gate"], seen["gate"])
    assert bool((before["product"] != seen["product"]).all())
    with perturbed(module, slices["gate"]):
        module(*inputs)
    assert bool((before["gate"] != seen["gate"]).all())


def test_heads_of_the_papers_blocks() -> None:
    torch.manual_seed(0)
    block = hk.TransformerBlock(6, 5, n_heads=3, d_k=4, attention_bias=True).double()
    layer, x = block.attention, rows(2, 3, 6)
    assert named_slices(block) == {}
    slices = named_slices(block, heads=True)
    assert slices["attention.query.head_1.weight"] == "attention.W_Q[:, 4:8]"
    assert slices["attention.value.head_1.bias"] == "attention.b_V[2:4]"
    pairs = {role: (getattr(layer, f"W_{role[0].upper()}"), getattr(layer, f"b_{role[0].upper()}")) for role in ROLES}
    assert check_heads(block, lambda: {role: layer._heads(x, *pair, None, 3).detach() for role, pair in pairs.items()}) == 18


@pytest.mark.parametrize("case", [*FUSED, *SEPARATE])
def test_heads_are_all_of_a_role_and_parts_all_of_a_parameter(case: str) -> None:
    """Every entry once; a head moves its own role alone, as tests/training/test_fused.py sees, and so does the role."""
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
    "key heads that do not divide the heads": odd(qkv=nn.Linear(2, 30), num_heads=4, num_kv_heads=3, head_dim=3),
    "no width of a head": odd(qkv=nn.Linear(8, 24), num_heads=4),
    "a convolution": odd(qkv=nn.Conv2d(8, 24, 1), num_heads=4, head_dim=2),
    "gate_up_proj alone": odd(gate_up_proj=nn.Linear(8, 24)),
    "sizes that do not fit": odd(qkv=nn.Linear(8, 20), num_heads=4, head_dim=2),
    "qkv_proj of unknown order": odd(qkv_proj=nn.Linear(8, 24), num_attention_heads=4, head_dim=2),
    "not a number of heads": odd(qkv=nn.Linear(8, 24), num_heads=True, head_dim=8),
    "gate_up_proj of another width": odd(gate_up_proj=nn.Linear(8, 24), down_proj=nn.Linear(8, 8)),
    "computed weight": nn.utils.parametrizations.weight_norm(nn.Linear(8, 24, bias=False)),
    "queries with their gates": odd(
        q_proj=nn.Linear(8, 16), k_proj=nn.Linear(8, 8), v_proj=nn.Linear(8, 8), num_heads=4, head_dim=2
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_not_listed(case: str) -> None:
    assert named_slices(UNKNOWN[case], heads=True) == {}


def test_timms_layers_that_go_head_by_head_are_not_listed() -> None:
    _, tiny = imported("timm.models.tiny_vit", "Attention")
    _, maxxvit = imported("timm.models.maxxvit", "AttentionCl")
    for layer in (tiny(16, 4, num_heads=4, attn_ratio=1, resolution=(4, 4)), maxxvit(16, dim_head=4, head_first=True)):
        assert layer.qkv.weight.shape == (48, 16)
        assert named_slices(layer, heads=True) == {}
