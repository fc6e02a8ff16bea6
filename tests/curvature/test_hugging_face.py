"""Models of Hugging Face, adapters of peft, and a few of every kind of architecture (docs/models.md has the table).

Some of these models cast to float32 inside (norms, rotary angles, router, logits), whatever their parameters are;
``InDouble`` keeps those casts in float64, so that the agreement shows all digits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice
from model_zoo import ATTENTIONS, InDouble, checked, generic
from peft_cases import ADAPTED, INPUTS, gpt2, in_double, lora
from peft_cases import LABELS as ADAPTED_LABELS
from readings import assert_readings, in_turn
from torch import Tensor, nn

import hessiankit as hk

pytest.importorskip("transformers")

import transformers as hf

from benchmarks import models

VOCABULARY = 6
TOKENS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
SIZES = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER = {**SPECIAL, **SIZES, "max_position_embeddings": 8}


def llama(**options: Any) -> nn.Module:
    return generic(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, attn_implementation="sdpa", **options)))


def mixtral(**options: Any) -> nn.Module:
    own = {"experts_implementation": "eager", "num_local_experts": 3, "num_experts_per_tok": 2, "use_cache": False}
    return generic(hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, **own, attn_implementation="sdpa", **options)))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_at_the_left(attention):
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    sizes = {"n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 5, "attn_implementation": attention}
    module = InDouble(generic(hf.GPT2LMHeadModel(hf.GPT2Config(**SPECIAL, **sizes, use_cache=False))))
    inputs = {"input_ids": TOKENS * mask, "attention_mask": mask}
    report = checked(module, inputs, LABELS.masked_fill(mask == 0, -100), loss="cross_entropy")
    assert "model.lm_head.weight" not in report.hessian.names  # tied


def test_cache():
    checked(InDouble(llama(use_cache=True)), {"input_ids": TOKENS}, LABELS, loss="cross_entropy", directions=1)


@pytest.mark.slow
def test_routing_loss():
    module = InDouble(mixtral(output_router_logits=True))
    checked(module, {"input_ids": TOKENS, "labels": LABELS}, loss=None, directions=1)


def test_the_loss_of_a_model_that_casts_to_float32():
    report = hk.check(llama(use_cache=False), {"input_ids": TOKENS, "labels": LABELS}, loss=None)
    assert report, report.verdict
    assert report.hessian.matrix.dtype == torch.float64
    assert report.max_rel_error > 1e-10
    exact = [row.max_rel_error for row in report.rows if row.reference == "reverse-over-reverse"]
    assert max(exact) < 1e-5
    assert "tolerance 1e-03, as " in report.verdict
    assert "computes in torch.float32" in report.verdict


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(**INPUTS).logits.flatten(0, 1), ADAPTED_LABELS.flatten())


@pytest.mark.parametrize(
    ("k", "name"), [pytest.param(k, name, marks=pytest.mark.slow if k % 2 else ()) for k, name in enumerate(ADAPTED)]
)
def test_sub_hessian_of_all_adapters(k, name):
    model = in_double(ADAPTED[name]())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = gradient_twice(loss_of(model), list(trained.values()))
    options = {"loss": "cross_entropy", "readings": in_turn(k), "tolerance": 1e-10, "floor": 1e-10}
    H = assert_readings(expected, model, INPUTS, ADAPTED_LABELS, **options)["hessian"]
    assert H.names == tuple(trained)  # frozen parameters are constants
    assert H.fallbacks == ()


@pytest.mark.slow
def test_check_of_an_adapter():
    report = hk.check(lora(gpt2(n_layer=1), "c_attn", use_dora=True), INPUTS, ADAPTED_LABELS, loss="cross_entropy")
    assert report, report  # DoRA holds the norm of its weight constant
    assert all(h.healthy for h in report.health)


def merged() -> nn.Module:
    model = lora(gpt2(), "c_attn")
    model.merge_adapter()
    return model


BAD = {
    "dropout of the adapter": (
        lambda: lora(gpt2(), "c_attn", lora_dropout=0.1).train(),
        r"c_attn.lora_dropout.default' is a dropout layer \(p=0.1\) in training mode",
    ),
    "merged": (merged, "none of the parameters .*lora_A.* has an effect on the loss"),
    "unloaded": (lambda: lora(gpt2(), "c_attn").merge_and_unload(), "no parameters that require grad; call requires_grad_"),
}


@pytest.mark.parametrize(("case", "call"), zip(BAD, (hk.hessian, hk.hessian_operator, hk.hessian_diagonal), strict=True))
def test_one_clear_error(case, call):
    make, message = BAD[case]
    with pytest.raises(hk.InputError, match=message):
        call(make(), INPUTS, ADAPTED_LABELS, loss="cross_entropy")


pytest.importorskip("transformers")


SOME = [
    ("causal/gptj", "eager"),
    ("causal/gpt_neo", "eager"),
    ("causal/mamba2", "eager"),
    ("causal/deepseek_v3", "sdpa"),
    ("causal/glm4_moe", "sdpa"),
    ("masked/deberta", "eager"),
    ("sequences/t5", "eager"),
    ("images/dinov2", "sdpa"),
    ("timm/swin", "eager"),
    ("causal/gpt2", "eager"),
    ("causal/llama", "sdpa"),
    ("masked/bert", "sdpa"),
]
"""GPT-J, GPT-Neo, CodeGen, Mamba 2 and the mixtures promote float32 within float64; T5 and they do it within bfloat16."""


def assert_passed(name: str, attention: str) -> None:
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    row = models.measure(name, attention)
    assert row.passed, row
    assert row.reason or not math.isnan(row.bfloat16), row


@pytest.mark.parametrize(
    ("name", "attention"),
    [*SOME[:2], *(pytest.param(*one, marks=pytest.mark.slow) for one in SOME[2:])],
    ids=lambda x: x.replace("/", " "),
)
def test_some(name: str, attention: str) -> None:
    assert_passed(name, attention)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", models.every_name())
def test_every_one(name: str) -> None:
    for attention in models.attentions(name):
        assert_passed(name, attention)


def test_command(tmp_path, capsys) -> None:
    out, page = tmp_path / "rows.jsonl", tmp_path / "models.md"
    assert models.main(["--only", "causal/opt", "--attention", "sdpa", "--out", str(out), "--markdown", str(page)]) == 0
    assert capsys.readouterr().out.count("causal/opt (sdpa): float64") == 1
    assert "| causal/opt | sdpa |" in page.read_text()
    assert models.main(["--only", "no such model", "--out", str(out)]) == 2
