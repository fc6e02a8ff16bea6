"""Named parts of fused weights: a change of one part may move what the module itself takes for it, and nothing else.

What a module takes for its queries, keys and values is recorded where it hands them to torch's attention.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_zoo import optional
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from hessiankit.fused import named_slices
from hessiankit.request.selection import parse_part, rows_of_part, select

ROLES = ("query", "key", "value")
Model = tuple[nn.Module, tuple[Any, ...]]
Recorded = dict[str, Tensor]


class SelfAttention(nn.Module):
    """One linear layer for queries, keys and values, named and split as the small GPT implementations do."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """``qkv`` with fewer key heads than query heads."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.qkv(x).split(sizes, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class SelfCall(nn.Module):
    """nn.MultiheadAttention of one sequence with itself."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        memory = [F.pad(x, (0, width - x.shape[-1]), value=0.5) for width in (self.layer.kdim, self.layer.vdim)]
        return self.layer(x, *memory, need_weights=False)[0]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def attention(**options: Any) -> Model:
    return SelfCall(nn.MultiheadAttention(8, 4, batch_first=True, **options)), (rows(2, 3, 8),)


def imported(name: str, attribute: str) -> Any:
    """A library that may be missing."""
    optional(name.partition(".")[0])
    module = importlib.import_module(name)
    return module, getattr(module, attribute)


def hugging_face(family: str, **options: Any) -> Model:
    transformers, _ = imported("transformers", "GPT2Model")
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32, "attn_implementation": "sdpa", "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**(sizes | {"bos_token_id": 0, "eos_token_id": 0} | options))
    return transformers.AutoModel.from_config(config), (torch.tensor([[1, 4, 2], [7, 3, 9]]),)


def gpt2(**options: Any) -> Model:
    return hugging_face("GPT2", n_embd=16, n_layer=1, n_head=4, **options)


def timm_block() -> Model:
    _, block = imported("timm.models.vision_transformer", "Block")
    return block(8, 4, qkv_bias=True), (rows(2, 3, 8),)


FUSED: dict[str, Callable[[], Model]] = {
    "nn.MultiheadAttention": attention,
    "nn.MultiheadAttention without bias": lambda: attention(bias=False),
    "nn.TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), (rows(2, 3, 8),)),
    "small GPT": lambda: (SelfAttention(8, 4), (rows(2, 3, 8),)),
    "grouped qkv": lambda: (GroupedAttention(6, 4, 2, 3), (rows(2, 3, 6),)),
    "timm": timm_block,
    "GPT-2": gpt2,
    "Phi-3": lambda: hugging_face("Phi3", num_key_value_heads=2),
    "GPT-NeoX": lambda: hugging_face("GPTNeoX"),
    "Persimmon": lambda: hugging_face("Persimmon"),
    "ModernBERT": lambda: hugging_face("ModernBert", reference_compile=False),
    "StarCoder, one key head": lambda: hugging_face("GPTBigCode", multi_query=True),
    "StarCoder, every head": lambda: hugging_face("GPTBigCode", multi_query=False),
    "DBRX": lambda: hugging_face(
        "Dbrx", d_model=16, n_heads=4, n_layers=1, max_seq_len=32, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e9},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    ),
    "Falcon, one key head": lambda: hugging_face("Falcon", multi_query=True, new_decoder_architecture=False),
    "Falcon, every head": lambda: hugging_face("Falcon", multi_query=False, new_decoder_architecture=False),
    "Falcon, groups": lambda: hugging_face("Falcon", new_decoder_architecture=True, num_kv_heads=2),
}  # fmt: skip

SEPARATE: dict[str, Callable[[], Model]] = {
    "nn.MultiheadAttention of other keys": lambda: attention(kdim=10, vdim=9),
    "Llama": lambda: hugging_face("Llama", num_key_value_heads=2),
    "Llama, a width of its own": lambda: hugging_face("Llama", num_key_value_heads=2, head_dim=6),
    "BERT": lambda: hugging_face("Bert"),
    "OPT": lambda: hugging_face("OPT", ffn_dim=24, word_embed_proj_dim=16),
}  # fmt: skip


def build(case: str) -> Model:
    torch.manual_seed(0)
    module, inputs = (FUSED | SEPARATE)[case]()
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) / 2)
    return module, inputs


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
        parameter.view(-1)[rows_of_part(parameter.shape, parsed)] += 0.25
    yield module
    with torch.no_grad():
        parameter.copy_(kept)


def changed_heads(before: Tensor, after: Tensor) -> set[int]:
    return {h for h in range(before.shape[1]) if not torch.equal(before[:, h], after[:, h])}


@pytest.mark.parametrize("case", FUSED)
def test_a_part_moves_its_own_role_only(case: str, record: Callable[..., Recorded]) -> None:
    module, inputs = build(case)
    before = record(module, inputs)
    slices = {name: index for name, index in named_slices(module).items() if name.split(".")[-2] in ROLES}
    assert {name.split(".")[-2] for name in slices} == set(ROLES)
    for name, index in slices.items():
        with perturbed(module, index):
            after = record(module, inputs)
        for role in ROLES:
            expected = set(range(before[role].shape[1])) if role == name.split(".")[-2] else set()
            assert changed_heads(before[role], after[role]) == expected, (name, role)


@pytest.mark.parametrize("case", [*FUSED, *SEPARATE])
def test_a_head_moves_itself_only(case: str, record: Callable[..., Recorded]) -> None:
    module, inputs = build(case)
    before = record(module, inputs)
    slices = {name: index for name, index in named_slices(module, heads=True).items() if ".head_" in name}
    counts = {role: sum(f"{role}.head_" in name and name.endswith("weight") for name in slices) for role in ROLES}
    assert counts["query"] == before["query"].shape[1]
    assert counts["key"] == counts["value"]
    for name, index in slices.items():
        role, head = name.split(".")[-3], int(name.split(".")[-2].removeprefix("head_"))
        with perturbed(module, index):
            after = record(module, inputs)
        copies = before[role].shape[1] // counts[role]  # a key head may be handed over once for each of its queries
        for other in ROLES:
            expected = set(range(head * copies, (head + 1) * copies)) if other == role else set()
            assert changed_heads(before[other], after[other]) == expected, (name, other)


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.parametrize("heads", [False, True])
def test_the_parts_of_a_parameter_are_all_of_it(case: str, heads: bool) -> None:
    module, _ = build(case)
    found: dict[str, list[Tensor]] = {}
    for index in named_slices(module, heads=heads).values():
        name, parsed = parse_part(index)
        found.setdefault(name, []).append(rows_of_part(module.get_parameter(name).shape, parsed))
    assert any(name.endswith("weight") for name in found)
    for name, positions in found.items():
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(module.get_parameter(name).numel())), name


@pytest.mark.parametrize("case", [*FUSED, *SEPARATE])
def test_every_part_can_be_selected(case: str) -> None:
    module, _ = build(case)
    slices = named_slices(module, heads=True)
    assert set(select("who", module, slices.values()).parts) == set(slices.values())


def test_bloom_is_split_head_by_head() -> None:
    module, inputs = hugging_face("Bloom", n_layer=1, n_head=4, attn_implementation="eager")
    module = module.double().eval()
    layer = module.h[0].self_attention
    seen: list[tuple[Tensor, ...]] = []
    original = layer._reshape
    layer._reshape = lambda fused: seen.append(original(fused)) or seen[-1]  # (batch, heads, tokens, width) each
    module(*inputs)
    slices = named_slices(module, heads=True)
    assert len(slices) == 24
    for name, index in slices.items():
        role, head = name.split(".")[-3], int(name.split(".")[-2].removeprefix("head_"))
        seen[1:] = []
        with perturbed(module, index):
            module(*inputs)
        for other, before, after in zip(ROLES, *seen, strict=True):
            assert changed_heads(before, after) == ({head} if other == role else set()), name


def test_codegen_is_split_into_four_groups() -> None:
    module, inputs = hugging_face(
        "CodeGen", hidden_size=32, n_layer=1, num_attention_heads=8, rotary_dim=2, attn_implementation="eager"
    )
    module = module.double().eval()
    layer, seen = module.h[0].attn, []
    original = layer._attn
    layer._attn = lambda q, k, v, *rest: seen.append((q, k, v)) or original(q, k, v, *rest)  # (batch, heads, tokens, width)
    module(*inputs)
    slices = named_slices(module, heads=True)
    assert len(slices) == 24
    for name, index in slices.items():
        role, head = name.split(".")[-3], int(name.split(".")[-2].removeprefix("head_"))
        seen[1:] = []
        with perturbed(module, index):
            module(*inputs)
        for other, before, after in zip(ROLES, *seen, strict=True):
            assert changed_heads(before, after) == ({head} if other == role else set()), name


def test_latent_attention(record: Callable[..., Recorded]) -> None:
    latent = {"kv_lora_rank": 5, "q_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3}
    module, inputs = hugging_face("DeepseekV3", **latent, first_k_dense_replace=1)
    module = module.double().eval()
    before = record(module, inputs)
    slices = {name.split(".", 3)[3]: index for name, index in named_slices(module, heads=True).items() if ".mlp." not in name}
    assert len(slices) == 2 * 4 + 2
    for name, index in slices.items():
        role, *head, _ = name.split(".")
        with perturbed(module, index):
            after = record(module, inputs)
        for other in ROLES:
            mine = {int(head[0].removeprefix("head_"))} if head else {0, 1, 2, 3}
            moved = mine if role == other or (role, other) == ("shared_key", "key") else set()
            if role == "latent":
                moved = {0, 1, 2, 3} - (mine if other == "query" else set())
            assert changed_heads(before[other], after[other]) == moved, (name, other)


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
    assert len(slices) == 18
    assert slices["attention.query.head_1.weight"] == "attention.W_Q[:, 4:8]"
    assert slices["attention.value.head_1.bias"] == "attention.b_V[2:4]"
    weights = {"query": ("W_Q", "b_Q"), "key": ("W_K", "b_K"), "value": ("W_V", "b_V")}

    def split() -> dict[str, Tensor]:
        return {role: layer._heads(x, getattr(layer, w), getattr(layer, b)).detach() for role, (w, b) in weights.items()}

    before = split()
    for name, index in slices.items():
        role, head = name.split(".")[1], int(name.split(".")[2].removeprefix("head_"))
        with perturbed(block, index):
            after = split()
        for other in ROLES:
            assert changed_heads(before[other], after[other]) == ({head} if other == role else set()), name


def test_names_read_well() -> None:
    assert named_slices(gpt2()[0]) == {
        "h.0.attn.query.weight": "h.0.attn.c_attn.weight[:, 0:16]",
        "h.0.attn.key.weight": "h.0.attn.c_attn.weight[:, 16:32]",
        "h.0.attn.value.weight": "h.0.attn.c_attn.weight[:, 32:48]",
        "h.0.attn.query.bias": "h.0.attn.c_attn.bias[0:16]",
        "h.0.attn.key.bias": "h.0.attn.c_attn.bias[16:32]",
        "h.0.attn.value.bias": "h.0.attn.c_attn.bias[32:48]",
    }


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


def test_the_argument_is_a_module() -> None:
    with pytest.raises(hk.InputError, match=r"expected a torch\.nn\.Module, got str"):
        named_slices("h.0.attn")  # type: ignore[arg-type]
