"""Named parts of fused weights: a change of one part may move what the module itself takes for it, and nothing else.

What a module takes for its queries, keys and values is recorded where it hands them to torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_cases import FUSED, ROLES, SEPARATE, build, hugging_face, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.engine.problem.selection import parse_part, rows_of_part
from hessiankit.partition.fused import named_slices

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


def test_bloom_goes_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = hugging_face("Bloom", n_layer=1, n_head=4, attn_implementation="eager")
    module = module.double().eval()
    layer, seen = module.h[0].self_attention, []
    original = layer._reshape

    def watched(fused: Tensor) -> tuple[Tensor, ...]:
        seen.append(original(fused))
        return seen[-1]

    monkeypatch.setattr(layer, "_reshape", watched)

    def observe() -> Recorded:
        module(*inputs)
        return dict(zip(ROLES, seen.pop(), strict=True))

    assert check_heads(module, observe) == 24


def test_codegen_goes_by_four_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eager attention multiplies Q by K^T, then the probabilities by V, in every release of transformers."""
    sizes = {"hidden_size": 32, "n_layer": 1, "num_attention_heads": 8, "rotary_dim": 2}
    module, inputs = hugging_face("CodeGen", **sizes, attn_implementation="eager")
    module = module.double().eval()
    products: list[tuple[Tensor, Tensor]] = []
    original = torch.matmul

    def watched(left: Tensor, right: Tensor) -> Tensor:
        products.append((left, right))
        return original(left, right)

    monkeypatch.setattr(torch, "matmul", watched)

    def observe() -> Recorded:
        products.clear()
        module(*inputs)
        (query, key), (_, value) = ((left, right) for left, right in products if left.ndim == 4)
        return {"query": query, "key": key.transpose(-1, -2), "value": value}

    assert check_heads(module, observe) == 24


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


@pytest.mark.parametrize("family", ["Phi3", "Glm"])
def test_gate_and_up(family: str) -> None:
    module, inputs = hugging_face(family, num_key_value_heads=2, head_dim=4)
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
    assert check_heads(block, lambda: {role: layer._heads(x, *pair).detach() for role, pair in pairs.items()}) == 18


class Fused(nn.Module):
    """A fused layer with the attributes by which libraries say how it is arranged."""

    def __init__(
        self, layer: str, width: int, outputs: int, sizes: dict[str, Any], in_config: bool, flags: dict[str, bool]
    ) -> None:
        super().__init__()
        self.add_module(layer, nn.Linear(width, outputs))
        holder = self
        if in_config:
            self.config = holder = SimpleNamespace()
        for name, value in sizes.items():
            setattr(holder, name, value)
        for name, flag in flags.items():
            setattr(self, name, flag)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["qkv", "Wqkv", "qkv_proj", "groups", "heads", "one key head"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["num_heads", "num_attention_heads", "n_heads", "n_head"]),
    st.sampled_from(["num_key_value_heads", "num_kv_heads", "num_heads_kv"]),
    st.sampled_from(["head_dim", "head_size", "attention_head_size"]),
    st.booleans(),
)
def test_heads_of_every_arrangement(
    order: str, groups: int, each: int, width: int, heads_name: str, keys_name: str, width_name: str, in_config: bool
) -> None:
    """The rows of each head by the reshapes of the libraries' own forward passes, applied to the numbers of the rows."""
    heads = groups * each
    of_qkv = order in ("qkv", "Wqkv", "qkv_proj")
    keys = groups if of_qkv or order == "groups" else heads if order == "heads" else 1
    at = torch.arange((heads + 2 * keys) * width)
    if of_qkv or order == "one key head":
        expected = [part.view(-1, width) for part in at.split([heads * width, keys * width, keys * width])]
    else:
        group = at.view(keys, heads // keys + 2, width)
        expected = [group[:, :-2].flatten(0, 1), group[:, -2], group[:, -1]]
    sizes = {heads_name: heads, keys_name: groups, width_name: width}
    if order in ("heads", "one key head"):
        del sizes[keys_name]
    flags = {} if of_qkv or order == "heads" else {"new_decoder_architecture": order == "groups", "multi_query": True}
    layer = order if of_qkv else "query_key_value"
    module = Fused(layer, 2, len(at), sizes, in_config and order != "qkv_proj", flags)  # which needs its own number of key heads
    slices = named_slices(module, heads=True)
    assert len(slices) == 2 * (heads + 2 * keys)
    for role, rows_of_heads in zip(ROLES, expected, strict=True):
        for h, own in enumerate(rows_of_heads):
            for kind in ("weight", "bias"):
                name, parsed = parse_part(slices[f"{role}.head_{h}.{kind}"])
                assert name == f"{layer}.{kind}"
                entries = rows_of_part((len(at), 2) if kind == "weight" else (len(at),), parsed)
                assert torch.equal(entries, torch.arange(2 * len(at)).view(-1, 2)[own].flatten() if kind == "weight" else own)
