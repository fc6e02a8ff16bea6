"""What kind a module is, which modules are blocks, and what the modules alone do not tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import Formula
from parts_models import CASES, GROUPED, D, H, L, hugging_face
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.partition.modules import is_linear, is_norm, is_scale


def gain(width: int) -> nn.Module:
    """An RMS norm whose name does not say so, as Gemma's: a gain of 1 + w."""
    return Formula(lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + m.w), w=(width,))


NORMS = [nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3), gain(3), gain(3).half(), gain(64).bfloat16()]
SCALE = Formula(lambda m, x: x * m.weight, weight=(3,))
OTHERS = [
    SCALE,
    nn.Linear(3, 3),
    Formula(lambda m, x: x + m.weight, weight=(3,)),
    Formula(lambda m, x: (m.weight + 1).expand_as(x), weight=(3,)),  # does not change when its input does: reads nothing
    nn.PReLU(3),
    nn.Embedding(3, 3),
    nn.Identity(),
    nn.Sequential(gain(3)),
]


@pytest.mark.parametrize("module", NORMS, ids=lambda m: type(m).__name__)
def test_norms_by_what_they_compute(module: nn.Module) -> None:
    assert is_norm(module)
    assert not is_scale(module)
    assert not is_linear(module)


@pytest.mark.parametrize("module", OTHERS, ids=lambda m: type(m).__name__)
def test_what_is_no_norm(module: nn.Module) -> None:
    assert not is_norm(module)
    assert is_scale(module) is (module is SCALE)


def test_trying_a_module_leaves_it_alone() -> None:
    module, calls = gain(3), []
    module.register_forward_hook(lambda *_: calls.append(1))
    assert is_norm(module)
    assert calls == []
    assert module.w.grad is None


def layers(model: nn.Module) -> dict[str, int | None]:
    return {part.parameter: part.layer for part in model_parts(model)}


def test_blocks_of_a_sequence_are_counted_without_the_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 4), hk.TransformerBlock(4, 5), nn.Dropout(0.1), hk.TransformerBlock(4, 5), nn.LayerNorm(4))
    found = layers(model)
    assert {found["1.attention.W_Q"], found["3.attention.W_Q"], found["0.weight"], found["4.weight"]} == {0, 1, None}
    types = hk.block_types(model)
    assert (types["0.weight"], types["4.weight"]) == ("Emb", "Norm")


def test_an_encoder_comes_before_its_decoder() -> None:
    found = layers(CASES["T5"].build())
    for k in range(L):
        assert found[f"encoder.block.{k}.layer.0.SelfAttention.q.weight"] == k
        assert found[f"decoder.block.{k}.layer.2.DenseReluDense.wo.weight"] == L + k


def roles(name: str) -> dict[str, str]:
    return {part.parameter: part.role for part in model_parts(CASES[name].build())}


def test_final_norms() -> None:
    """After a stack by place, as T5's encoder's; by name where it is made before the blocks, as OPT's."""
    t5, opt, bloom = roles("T5"), roles("OPT"), roles("Bloom")
    assert t5["encoder.final_layer_norm.weight"] == t5["decoder.final_layer_norm.weight"] == "final gain"
    assert opt["model.decoder.final_layer_norm.bias"] == "final norm bias"
    assert opt["model.decoder.layers.1.final_layer_norm.weight"] == "gain"  # the second norm of a block
    assert (bloom["transformer.word_embeddings_layernorm.weight"], bloom["transformer.ln_f.weight"]) == ("gain", "final gain")


def test_layers_between_stages() -> None:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
    model = hugging_face("SwinForImageClassification", "Swin", **sizes)().eval()
    parts = {part.parameter: part for part in model_parts(model, inputs={"pixel_values": torch.rand(1, 3, 16, 16)})}
    assert sorted({part.layer for part in parts.values()} - {None}) == [0, 1, 2, 3]
    between = parts["swin.encoder.layers.0.downsample.reduction.weight"]
    assert (between.type, between.role, between.layer) == ("Other", "map between blocks", None)
    table = next(part for name, part in parts.items() if name.endswith("bias_table"))
    assert (table.type, table.role) == ("Emb", "relative position bias")
    assert "added to the scores" in table.reason


def test_a_mixer_that_is_no_attention_is_not_taken_for_a_feed_forward_layer() -> None:
    sizes = {**GROUPED, "head_dim": 4, "num_local_experts": 3, "layer_types": ["linear_attention", "full_attention"]}
    model = hugging_face("MiniMaxForCausalLM", "MiniMax", **sizes)()
    unknown = "'model.layers.0.self_attn.qkv_proj.weight' .Linear., 'model.layers.0.self_attn.output_gate.weight' .Linear.; pass"
    for inputs in (None, {"input_ids": torch.tensor([[1, 2, 3]])}):
        with pytest.raises(hk.InputError, match=f"not recognised: {unknown}"):
            model_parts(model.eval(), inputs=inputs)
    parts = model_parts(model, overrides={r"qkv_proj|output_gate": "Other"})
    assert {part.layer for part in parts if part.parameter.endswith("experts.down_proj")} == {0, 1}


@pytest.mark.parametrize(("into", "out", "expected"), [(4, 7, "Head"), (7, 4, "Emb"), (4, 4, "Emb"), (6, 7, "Emb")])
def test_a_linear_map_made_before_the_blocks_is_a_head_where_it_leads_out_of_their_width(
    into: int, out: int, expected: str
) -> None:
    """What a map outside the blocks is shows in its sizes alone."""
    blocks = nn.ModuleList([hk.TransformerBlock(4, 5), hk.TransformerBlock(4, 5)])
    assert hk.block_types(Formula(None, first=nn.Linear(into, out), blocks=blocks))["first.weight"] == expected


def test_attention_sinks_and_biases_of_experts() -> None:
    model = hugging_face(
        "GptOssForCausalLM", "GptOss", **GROUPED, head_dim=4, num_local_experts=3, num_experts_per_tok=2
    )().eval()
    for inputs in (None, {"input_ids": torch.tensor([[1, 2, 3]])}):
        parts: dict[str, Part] = {part.parameter: part for part in model_parts(model, inputs=inputs)}
        assert (parts["model.layers.0.self_attn.sinks"].type, parts["model.layers.1.self_attn.sinks"].role) == (
            "Other",
            "attention sink",
        )
        assert parts["model.layers.0.mlp.experts.gate_up_proj_bias"].role == ("up bias" if inputs else "feed-forward bias")
        assert parts["model.layers.0.mlp.router.bias"].role == "router bias"


def test_cross_attention_and_its_fused_halves() -> None:
    """GPT-2 with cross-attention: queries by a layer of their own, keys and values fused."""
    hf = pytest.importorskip("transformers")
    block = hf.models.gpt2.modeling_gpt2.GPT2Block(hf.GPT2Config(n_embd=D, n_head=H, add_cross_attention=True), layer_idx=0)
    types = hk.block_types(block)
    assert types["crossattention.q_attn.weight"] == "QK"
    assert types[f"crossattention.c_attn.weight[:, 0:{D}]"] == "QK"
    assert types[f"crossattention.c_attn.weight[:, {D}:{2 * D}]"] == "VO"


@pytest.mark.parametrize("options", [{"kdim": 5, "vdim": 7}, {"add_bias_kv": True}])
def test_torch_attention_with_separate_weights(options: dict[str, int]) -> None:
    types = hk.block_types(nn.MultiheadAttention(8, 2, **options))
    separate = {"q_proj_weight": "QK", "k_proj_weight": "QK", "v_proj_weight": "VO"}
    learned = {"bias_k": "QK", "bias_v": "VO"}
    for name, kind in (separate if "kdim" in options else learned).items():
        assert types[name] == kind
    assert types["in_proj_bias[0:8]"] == types["in_proj_bias[8:16]"] == "QK"
    assert types["in_proj_bias[16:24]"] == types["out_proj.weight"] == "VO"


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "DeepSeek-V3"])
def test_a_model_without_values(name: str) -> None:
    """On the meta device, where no norm can be tried, the types are the same."""
    model = CASES[name].build().to("meta")
    model.tie_weights()
    assert hk.block_types(model) == hk.block_types(CASES[name].build())


def test_a_linear_map_by_itself_is_nothing_known() -> None:
    with pytest.raises(hk.InputError, match=r"not recognised: 'weight' \(Linear\), 'bias' \(Linear\)"):
        model_parts(nn.Linear(3, 3))


def test_blocks_that_are_not_recognised_are_not_taken_for_a_head() -> None:
    """CaiT mixes the scores of its heads by weights: its blocks are no attention that is known, beside others that are."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("cait_xxs24_224", pretrained=False, depth=2, img_size=32).eval()
    with pytest.raises(hk.InputError, match=r"not recognised: 'blocks\.0\.attn\.qkv\.weight'") as error:
        model_parts(model)
    assert "token_only" not in str(error.value)


def test_a_head_with_an_attention_of_its_own() -> None:
    sizes = {"hidden_size": D, "intermediate_size": 20, "num_hidden_layers": L, "num_attention_heads": H, "image_size": 8}
    model = hugging_face("SiglipVisionModel", "SiglipVision", **sizes, patch_size=4)().eval()
    types = hk.block_types(model, inputs={"pixel_values": torch.rand(1, 3, 8, 8)})
    named = {name.removeprefix("vision_model."): kind for name, kind in types.items()}
    assert named["head.attention.out_proj.weight"] == "VO"
    assert named["head.mlp.fc1.weight"] == named["head.mlp.fc2.weight"] == "Head"
    assert named["head.probe"] == named["embeddings.patch_embedding.weight"] == "Emb"


def test_a_router_has_as_many_outputs_as_there_are_experts_in_the_list_beside_it() -> None:
    """Of which no attribute gives the number."""

    def mixture() -> nn.Module:
        experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(3))
        return Formula(None, self_attn=nn.MultiheadAttention(4, 2), gate=nn.Linear(4, 3), experts=experts)

    parts = {part.parameter: part for part in model_parts(nn.ModuleList([mixture(), mixture()]))}
    assert (parts["0.gate.weight"].type, parts["1.gate.weight"].role) == ("Other", "router")
    assert parts["0.experts.2.0.weight"].type == "FFN"


def test_an_attention_whose_queries_are_a_parameter() -> None:
    """Learned queries, as in a Perceiver."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out_proj(torch.softmax(m.latents @ m.key(x).mT, -1) @ m.value(x))

    pooling = Formula(forward, latents=(2, D), **{name: nn.Linear(D, D) for name in ("key", "value", "out_proj")})
    found = {part.parameter: (part.type, part.role) for part in model_parts(pooling, overrides={"latents": "Emb"})}
    kinds = {name: found[f"{name}.weight"] for name in ("key", "value", "out_proj")}
    assert kinds == {"key": ("QK", "key"), "value": ("VO", "value"), "out_proj": ("VO", "output")}
