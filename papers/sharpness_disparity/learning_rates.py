"""Blockwise learning rates (Sections 5 and 6, App. A), and the sizes of Tables 3 and 4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer
from hessiankit.training.optim import block_types
from hessiankit.training.partition.fused import named_slices
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, assumed, counts, relative_error, small, violated, wrong
from papers.registry import claim
from papers.sharpness_disparity.principle import ORDER, RATES

STEPS = 50_000


def adamw(values: list[Tensor], gradients: list[list[Tensor]], rates: list[float], decay: float = 0.1) -> list[Tensor]:
    """Return parameters after AdamW with a rate for each, one step for each list of gradients."""
    parameters = [nn.Parameter(v.clone()) for v in values]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


@claim("eq5", "Sec. 6, Eq. 5", "HOLDS")
def eq5(seed: int) -> Evidence:
    r"""$r(\mathrm{Emb}) = 10, r(\mathrm{QK}) = 8, r(\mathrm{FFN}) = 6, r(\mathrm{VO}) = 4$ follow the trend of
    $\mathcal{S}(\mathrm{Norm})/\mathcal{S}(\bullet)$ along Eq. 1"""
    falling = sum(RATES[a] > RATES[b] for a, b in itertools.combinations(ORDER, 2))
    detail = "of the ten pairs of types, those whose flatter type in Eq. 1 has the larger rate; S itself has no numbers in print"
    return counts(falling, 10, detail)


@claim("weight-decay", "Sec. 6, Baselines", "OMITTED")
def weight_decay(seed: int) -> Evidence:
    r"""weight decay $\lambda = 0.1$, the same with Blockwise LR
    Correct: AdamW shrinks weights by $\eta\lambda$, so a rate $r$ times larger decays its block $r$ times faster: the
    embedding 10 times"""
    theta = Draw(seed).normal(5)
    rates, zero = [1e-3, 1e-2], [torch.zeros_like(theta)] * 2
    after = adamw([theta, theta], [zero], rates)
    found = torch.stack([1 - a / theta for a in after])
    expected = torch.tensor([[1e-4], [1e-3]], dtype=torch.float64).expand(2, 5)
    return small(float((found - expected).abs().max()), "shrinkage in one step without a gradient, r = 1 and r = 10")


@claim("fused", "Sec. 5, for fused attention weights", "HOLDS UNDER ASSUMPTION", uses=[named_slices])
def fused(seed: int) -> Evidence:
    """the learning rate of a block type is set where the optimizer's groups are made
    Needs: QK and VO are separate tensors; a fused $(W_Q, W_K, W_V)$ has one rate. Rescaling each slice after the step,
    old + r (new - old), equals a separate rate; scaling the gradient does not"""
    draw, rates = Draw(seed), [8e-3, 4e-3]
    parts = [draw.normal(4, 3), draw.normal(2, 3)]
    steps = [[draw.normal(4, 3), draw.normal(2, 3)] for _ in range(5)]
    split = torch.cat(adamw(parts, steps, rates))
    whole, scaled = torch.cat(parts), torch.cat(parts)
    factor = torch.tensor([8.0] * 4 + [4.0] * 2, dtype=torch.float64)[:, None]
    base = nn.Parameter(whole.clone())
    optimizer = torch.optim.AdamW([base], 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in steps:
        base.grad, old = torch.cat(step), base.detach().clone()
        optimizer.step()
        with torch.no_grad():
            base.copy_(old + factor * (base - old))
    scaled = adamw([scaled], [[factor * torch.cat(step)] for step in steps], [1e-3])[0]
    holds = agrees(base.detach(), split, "five steps of AdamW, r = 8 and 4, the step rescaled")
    return assumed(holds, relative_error(scaled, split), above=1e-3)


@claim("fused-sharpness", "Sec. 3.2, block types, for fused attention weights", "HOLDS UNDER ASSUMPTION", uses=[named_slices])
def fused_sharpness(seed: int) -> Evidence:
    """QK and VO are blocks of parameters of their own
    Needs: fused tensors are split into their parts; one average over the tensor is neither S(QK) nor S(VO)"""
    draw, D = Draw(seed), 6
    attention = nn.MultiheadAttention(D, 2, batch_first=True, bias=False).double()
    with torch.no_grad():
        for p in attention.parameters():
            p.copy_(draw.normal(*p.shape, std=0.1))
    X = draw.normal(1, 4, D)
    value = (attention(X, X, X, need_weights=False)[0] * draw.normal(1, 4, D)).sum()
    (g,) = torch.autograd.grad(value, attention.in_proj_weight)
    QK, V, whole = (float(part.square().mean()) for part in (g[: 2 * D], g[2 * D :], g))
    holds = agrees((2 * QK + V) / 3, whole, "the tensor's average from those of its parts")
    return assumed(holds, abs(whole / QK - 1), above=0.5)


@claim("block-types", "Sec. 3.2, block types", "OMITTED", uses=[block_types])
def types(seed: int) -> Evidence:
    r"""which of $\{\mathrm{Emb}, \mathrm{QK}, \mathrm{VO}, \mathrm{FFN}, \mathrm{Norm}\}$ the other parameters belong to
    Correct: an untied head, which the LLaMA models have, belongs to none; learned positions and the last norm are not
    mentioned"""
    model = Transformer(9, 8, 12, 1, 2, placement="pre", norm="rmsnorm", activation="swiglu", rotary=True, tied=False, seed=seed)
    outside = [name for name, t in block_types(model).items() if t not in ORDER]
    untied = [name for name, _ in model.named_parameters() if "head" in name or "unembed" in name or name.endswith("W_C")]
    detail = f"parameters of a LLaMA-like model outside the five types: {', '.join(outside)}"
    tables = sum(9 in p.shape for p in model.parameters())  # of the vocabulary's size: the embedding and the head
    by = "the tables of the vocabulary's size but one"
    return wrong(0.0, float(len(outside)), detail, corrected=float(len(untied)), second=float(tables - 1), by=by)


RULES: dict[str, Callable[[str], bool]] = {
    "embed": lambda name: "embed" in name,
    "head": lambda name: "lm_head" in name,
    "norm": lambda name: "norm" in name,
    "qk": lambda name: "q_proj" in name or "k_proj" in name,
    "vo": lambda name: "v_proj" in name or "o_proj" in name,
    "mlp": lambda name: "mlp" in name,
}
"""The released script for LLaMA, by parts of names."""
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "gpt_neox.layers.0.attention.query_key_value.weight",
    "model.layers.0.mlp.norm.weight",
    "model.embed_norm.weight",
)
"""Parameters of LLaMA (the first three), Phi-3, Mixtral, GPT-NeoX, and two with norms inside other parts."""


@claim("code-names", "released code, grouping of parameters", "HOLDS UNDER ASSUMPTION", uses=[block_types])
def code_names(seed: int) -> Evidence:
    """parts of names put every parameter into exactly one group
    Needs: names as in the paper's models. In other models some parameters are in no group, and are never trained, or in
    two, or in the wrong one; block_types takes the type from the module that owns the parameter"""
    groups = [[group for group, rule in RULES.items() if rule(name)] for name in NAMES]
    right = groups[:3] == [["embed"], ["qk"], ["mlp"]]
    elsewhere = [abs(len(found) - 1) for found in groups[3:]]
    return assumed(counts(sum(map(len, groups[:3])), 3 * right, "groups of three names of LLaMA"), sum(elsewhere), above=3)


# Tables 1-4 and App. A.1: what arithmetic can check
VOCABULARY, T5 = 50304, 32100


class Row(NamedTuple):
    """A row of Table 3 or 4: sizes, and the printed millions of parameters."""

    name: str
    printed: int
    d_model: int
    d_ff: int
    n_heads: int
    depth: int
    table: int = 3
    kv: int | None = None


TABLE_3 = (
    Row("GPT-2 (small)", 124, 768, 3072, 12, 12),
    Row("LLaMA (0.13B)", 134, 768, 3072, 12, 6),
    Row("LLaMA (0.25B)", 237, 1024, 4096, 16, 8),
    Row("LLaMA (0.5B)", 522, 1280, 5120, 20, 15),
    Row("LLaMA (0.75B)", 743, 1664, 6656, 26, 13),
    Row("LLaMA (1.1B)", 1175, 2048, 5632, 32, 22, kv=4),
    Row("LLaMA (2B)", 2025, 2048, 8192, 32, 22),
)
TABLE_4 = (
    Row("LLaMA (66M)", 66, 512, 2048, 8, 8, 4),
    Row("LLaMA (0.2B)", 200, 768, 3072, 16, 8, 4),
    Row("LLaMA (0.4B)", 400, 1280, 5120, 16, 12, 4),
    Row("LLaMA (1B)", 1004, 1600, 6400, 25, 22, 4),
)


def by_hand(row: Row) -> float:
    """Count the parameters of a LLaMA of Table 3 or 4, in millions, by its sizes alone."""
    d, vocabulary = row.d_model, VOCABULARY if row.table == 3 else T5
    return float(Fraction(2 * vocabulary * d + d + row.depth * (4 * d * d + 3 * d * row.d_ff + 2 * d), 10**6))


def millions(row: Row, depth: int | None = None) -> float:
    """Count the parameters of hessiankit's model of these sizes, without memory: one block stands for all of them."""
    gpt = row.name.startswith("GPT")
    options: dict[str, Any] = (
        {"activation": "gelu", "max_len": 1024} if gpt else {"activation": "swiglu", "norm": "rmsnorm", "rotary": True}
    )
    vocabulary = VOCABULARY if row.table == 3 else T5
    with torch.device("meta"):
        model = Transformer(
            vocabulary, row.d_model, row.d_ff, 1, row.n_heads, placement="pre", tied=gpt, n_kv_heads=row.kv, **options
        )  # fmt: skip
    # the models have no biases; hessiankit's LayerNorm has
    block = sum(p.numel() for name, p in model.blocks[0].named_parameters() if not name.endswith("bias"))
    rest = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("blocks") and not name.endswith("bias"))
    return (rest + (depth or row.depth) * block) / 1e6


@claim("table3-table4-sizes", "Tables 3 and 4", "HOLDS", uses=[Transformer])
def sizes(seed: int) -> Evidence:
    """the printed millions of parameters follow from the printed sizes to 1 %, for nine of the eleven models
    Correct: not for LLaMA (2B) of Table 3 and LLaMA (0.2B) of Table 4, which have rows of their own"""
    rows = (*TABLE_3[:-1], TABLE_4[0], *TABLE_4[2:])
    return small([abs(millions(row) / row.printed - 1) for row in rows], "nine models, counted", below=0.01)


@claim("table3-llama-2b", "Table 3, LLaMA (2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_2b(seed: int) -> Evidence:
    """2025 M parameters with $d_{model} = 2048$, $d_{FF} = 8192$, 32 heads, depth 22
    Correct: 1683 M; depth 27 would give 2018 M
    Severity: slip of print"""
    row = TABLE_3[-1]
    found, deeper = millions(row), millions(row, 27)
    detail = f"millions; {deeper:.1f} at depth 27"
    return wrong(row.printed, found, detail, corrected=1683.0, above=0.1, below=1e-3, second=by_hand(row), by="counted by hand")


@claim("table4-llama-0.2b", "Table 4, LLaMA (0.2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_02b(seed: int) -> Evidence:
    """200 M parameters with $d_{model} = 768$, $d_{FF} = 3072$, 16 heads, depth 8
    Correct: 125 M; 8 heads and depth 16, the two swapped, give 200 M, and 768 / 16 is a head of 48
    Severity: slip of print"""
    row = TABLE_4[1]
    found, swapped = millions(row), millions(row._replace(n_heads=8), 16)
    detail = f"millions; {swapped:.1f} with heads and depth swapped"
    return wrong(row.printed, found, detail, corrected=125.0, above=0.1, below=5e-3, second=by_hand(row), by="counted by hand")


@claim("size-range", "Abstract; Sec. 1; Sec. 6", "WRONG AS PRINTED")
def size_range(seed: int) -> Evidence:
    """model sizes range from 0.12B to 2B
    Correct: from 66 M (Table 4) to 1.7 B by the sizes of Table 3
    Severity: slip of print
    Follows: table3-llama-2b"""
    least, most = min(r.printed for r in (*TABLE_3, *TABLE_4)), round(millions(TABLE_3[-1]))
    detail = "least and largest, in millions: Table 4, and the sizes of Table 3"
    second = [round(by_hand(TABLE_4[0])), round(by_hand(TABLE_3[-1]))]
    return wrong(
        [120.0, 2000.0], [float(least), float(most)], detail, corrected=[66.0, 1683.0], second=second, by="counted by hand"
    )


@claim("ffn-majority", "Sec. 6.2", "WRONG AS PRINTED", uses=[Transformer])
def ffn_majority(seed: int) -> Evidence:
    """'FFN blocks comprise the majority of model parameters', LLaMA 0.25B
    Correct: 42 %: the largest type, but embedding and head together are larger; it is the majority of the blocks' parameters,
    75 %
    Severity: scope"""
    row = TABLE_3[2]
    ffn = 3 * row.d_model * row.d_ff * row.depth / 1e6
    ends = 2 * VOCABULARY * row.d_model / 1e6
    rest, of_blocks = millions(row) - ffn, millions(row) - ffn - ends
    detail = f"millions that are not of the FFN, {rest:.0f}, over its {ffn:.0f}; without embedding and head {of_blocks:.0f}"
    second = [by_hand(row) - ffn, by_hand(row) - ffn - ends]
    return violated([rest, of_blocks], [ffn, math.inf], detail, corrected=[math.inf, ffn], second=second, by="counted by hand")
