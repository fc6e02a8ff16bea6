"""``derive`` of one's own module: the trace in chapters, against autograd and the Hessian, with what has no chapter named."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
import torch
from derivation_reference import assert_agree, expected_of
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit import InputError, derive, hessian
from hessiankit.theory.formulas.code import identifier

X = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.map(self.norm(x)))


class Gated(nn.Module):
    """A mean over tokens, a product of two branches, a difference, a number and a power."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.RMSNorm(3)

    def forward(self, x):
        y = self.norm(self.one(x).sigmoid() * self.two(x))
        return 0.5 * y.mean(1, keepdim=True) - torch.softmax(y, -1).pow(2)


class Call(NamedTuple):
    module: nn.Module
    inputs: object
    names: tuple[str, str]


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=4, n_head=2, n_inner=3, n_layer=1, attn_implementation="sdpa")
    return Call(GPT2Block(config, layer_idx=0), X, ("ln_1.weight", "mlp.c_fc.bias"))


def llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4, num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=2, attn_implementation="sdpa"
    )
    turns = LlamaRotaryEmbedding(config)(X.float(), torch.arange(2)[None])
    inputs = {"hidden_states": X, "position_embeddings": tuple(x.double() for x in turns)}
    return Call(LlamaDecoderLayer(config, 0), inputs, ("input_layernorm.weight", "self_attn.k_proj.weight"))


CALLS = {
    "sequential": lambda: Call(nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), X, ("0.weight", "2.weight")),
    "residual": lambda: Call(Residual(), X, ("norm.weight", "map.weight")),
    "gated": lambda: Call(Gated(), X, ("one.bias", "two.weight")),
    "attention": lambda: Call(nn.MultiheadAttention(4, 2, batch_first=True), X, ("in_proj_bias", "out_proj.weight")),
    "encoder": lambda: Call(nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), X, ("norm1.weight", "linear1.bias")),
    "gpt2": gpt2,
    "llama": llama,
}


@pytest.fixture(params=CALLS)
def call(request):
    torch.manual_seed(0)
    built = CALLS[request.param]()
    built.module.double().eval()
    with torch.no_grad():
        for p in built.module.parameters():
            p.copy_(0.5 * torch.randn(p.shape) + (p.ndim == 1))
    return built


def value(call, changed):
    """The module's first output with some parameters changed."""
    args, kwargs = ((), call.inputs) if isinstance(call.inputs, dict) else ((call.inputs,), {})
    args = args * 3 if isinstance(call.module, nn.MultiheadAttention) else args
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
        output = functional_call(call.module, changed, args, kwargs)
    return output[0] if isinstance(output, tuple) else output


def in_double(call):
    """Llama's norms compute in single precision whatever the module's type is."""
    return "Llama" not in type(call.module).__name__


def test_a_module_is_differentiated_at_its_own_parameters(call):
    point = {name: p.detach() for name, p in call.module.named_parameters()}
    for wrt in (call.names[:1], call.names, call.names[::-1]):
        found = derive(call.module, wrt=wrt, inputs=call.inputs)
        with sdpa_kernel(SDPBackend.MATH):
            expected = expected_of(lambda changed: value(call, {**point, **changed}), point, *wrt)
        if in_double(call):
            assert_agree(found.dense(), expected)
        else:
            assert (found.dense() - expected).abs().max() < 1e-5 * expected.abs().max()
        assert found.norm_bound() >= torch.linalg.matrix_norm(found.dense(), 2) * (1 - 1e-12)
        assert not any(mark in found.latex() for mark in ("}_{}", "}_0_"))


def test_its_function_has_the_numbers_of_the_formula(call):
    found = derive(call.module, wrt=call.names, inputs=call.inputs)
    function, subject = found.function("torch"), found._make_assignments.args[0]
    arrays = {identifier(subject.symbols[name]): array for name, array in subject.point.items()}
    assert_agree(
        function(**{name: arrays[name] for name in inspect.signature(function).parameters if name in arrays}), found.dense()
    )
    assert all(count > 0 for count in subject.numbers.values())


def test_with_a_loss_it_is_a_block_of_the_hessian(call):
    if isinstance(call.module, nn.MultiheadAttention) or not in_double(call):
        pytest.skip("its call has several inputs or another precision")
    target = torch.zeros_like(value(call, {}))
    found = derive(call.module, wrt=call.names, inputs=call.inputs, loss="mse", target=target)
    expected = hessian(call.module, X, target, loss="mse").block(*call.names)
    assert (found.dense() - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_letters_are_those_of_the_parameters():
    text = str(derive(nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), wrt=("X", "0.bias"), inputs=X))
    assert text.startswith("∂²Z/(∂X ∂b_0) = (I_2 ⊗ W_2 ⊗ I_8)")
    assert set(map(str, derive(nn.TransformerEncoderLayer(4, 2, 3).eval(), inputs=X).sympy().parameters)) == {"c", r"\varepsilon"}


REFUSED = [
    (nn.Sequential(nn.Tanh(), nn.Softplus()), {"inputs": X}, r"softplus \(softplus\) has no chapter as it is used here"),
    (nn.Sequential(nn.Tanh(), nn.Softmax(0)), {"inputs": X}, r"softmax \(Softmax\) has no chapter"),
    (
        nn.TransformerEncoderLayer(4, 2, 3, batch_first=True),
        {"inputs": X.float()},
        "has no chapter as it is used here.*or call eval",
    ),
    (nn.Sequential(nn.Linear(4, 4)), {}, "its trace needs inputs; pass inputs=X"),
    (
        nn.Sequential(nn.Linear(4, 4)),
        {"inputs": X.float(), "wrt": "weight"},
        "wrt='weight' is not known; did you mean '0.weight'",
    ),
]


@pytest.mark.parametrize(("module", "options", "message"), REFUSED)
def test_what_has_no_chapter_is_named(module, options, message):
    with pytest.raises(InputError, match=f"derive: .*{message}"):
        derive(module, **{"wrt": "X", **options})
