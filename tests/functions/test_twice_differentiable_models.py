"""Models of Hugging Face inside the context, unmodified, against eager attention."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from model_zoo import InDouble
from operator_cases import error
from torch import Tensor, nn
from twice_differentiable_cases import agree, product, within

import hessiankit as hk
from benchmarks.architectures import build, quiet

MODELS = (
    "causal/gpt2", "causal/llama", "causal/mistral", "causal/qwen2", "causal/phi3", "causal/opt", "causal/gpt_neox",
    "causal/cohere", "causal/falcon", "causal/mixtral", "causal/hyperclovax", "masked/bert", "masked/roberta",
    "masked/electra", "masked/modernbert", "sequences/bart", "sequences/t5", "sequences/marian", "images/vit",
    "images/deit", "images/dinov2",
)  # fmt: skip


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face(name: str) -> None:
    """Their own losses, with padding: float32, and float64 where their casts to float32 stay in float64."""
    pytest.importorskip("transformers")
    with quiet():
        models = [build(name, attention) for attention in ("eager", "sdpa")]
    for p, q in zip(models[0].model.parameters(), models[1].model.parameters(), strict=True):
        q.data = p.data
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        products = []
        for instance, context in zip(models, (nullcontext(), hk.twice_differentiable()), strict=True):
            model = InDouble(instance.model) if dtype == torch.float64 else instance.model.float()
            batch = {k: x.to(dtype) if x.is_floating_point() else x for k, x in instance.batch.items()}
            with context:
                products.append(product(lambda m=model, b=batch: m(**b).loss, [p for p in model.parameters() if p.requires_grad]))  # type: ignore[misc]
        assert error(products[1], products[0]) <= tolerance
        assert context.calls["scaled_dot_product_attention"] >= 1
        assert context.calls["cross_entropy_loss"] == ("images" not in name)


def test_autocast_of_a_model() -> None:
    """Products are those of eager attention, to the digits of bfloat16."""
    pytest.importorskip("transformers")
    with quiet():
        models = [build("causal/gpt2", attention) for attention in ("eager", "sdpa")]
    products = []
    for instance, context in zip(models, (nullcontext(), hk.twice_differentiable()), strict=True):
        model, batch = instance.model.float(), instance.batch

        def loss(m: nn.Module = model, b: dict[str, Tensor] = batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return m(**b).loss

        with context:
            products.append(product(loss, list(model.parameters())))
    assert error(*products) <= 5e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_a_model(reentrant: bool) -> None:
    """Layers are run again in the backward pass, with attention as in the forward pass."""
    pytest.importorskip("transformers")
    with quiet():
        instance = build("causal/gpt2", "sdpa", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model, gradients = instance.model, []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.train()  # transformers checkpoint in training alone; dropout is off
        with hk.twice_differentiable() as context:
            model.zero_grad()
            model(**instance.batch).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert context.calls["scaled_dot_product_attention"] == (2 if checkpointed else 1)
    for a, b in zip(*gradients, strict=True):
        agree(a, b)
    if not reentrant:
        found = within(lambda: model(**instance.batch).loss, model)
        model.eval()
        agree(found, within(lambda: model(**instance.batch).loss, model))
