"""Tables 1-4 and App. A.1: what arithmetic can check."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from hessiankit.blocks import Transformer
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.evidence import small, violated, wrong
from hessiankit.ledger.registry import claim

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


@claim("sharpness-disparity/table3-table4-sizes", "Tables 3 and 4", "HOLDS", uses=[Transformer])
def sizes(seed: int) -> Evidence:
    """the printed millions of parameters follow from the printed sizes to 1 %, for nine of the eleven models

    Correct: not for LLaMA (2B) of Table 3 and LLaMA (0.2B) of Table 4, which have rows of their own
    """
    rows = (*TABLE_3[:-1], TABLE_4[0], *TABLE_4[2:])
    return small([abs(millions(row) / row.printed - 1) for row in rows], "nine models, counted", below=0.01)


@claim("sharpness-disparity/table3-llama-2b", "Table 3, LLaMA (2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_2b(seed: int) -> Evidence:
    """2025 M parameters with $d_{model} = 2048$, $d_{FF} = 8192$, 32 heads, depth 22

    Correct: 1683 M; depth 27 would give 2018 M
    """
    row = TABLE_3[-1]
    found, deeper = millions(row), millions(row, 27)
    d, exact = row.d_model, Fraction(2 * VOCABULARY * row.d_model + row.d_model, 10**6)
    exact += Fraction(row.depth * (4 * d * d + 3 * d * row.d_ff + 2 * d), 10**6)
    detail = f"millions; {deeper:.1f} at depth 27"
    return wrong(row.printed, found, detail, corrected=1683.0, above=0.1, below=1e-3, second=float(exact), by="counted by hand")


@claim("sharpness-disparity/table4-llama-0.2b", "Table 4, LLaMA (0.2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_02b(seed: int) -> Evidence:
    """200 M parameters with $d_{model} = 768$, $d_{FF} = 3072$, 16 heads, depth 8

    Correct: 125 M; 8 heads and depth 16, the two swapped, give 200 M, and 768 / 16 is a head of 48
    """
    row = TABLE_4[1]
    found, swapped = millions(row), millions(row._replace(n_heads=8), 16)
    d, exact = row.d_model, Fraction(2 * T5 * row.d_model + row.d_model, 10**6)
    exact += Fraction(row.depth * (4 * d * d + 3 * d * row.d_ff + 2 * d), 10**6)
    detail = f"millions; {swapped:.1f} with heads and depth swapped"
    return wrong(row.printed, found, detail, corrected=125.0, above=0.1, below=5e-3, second=float(exact), by="counted by hand")


@claim("sharpness-disparity/size-range", "Abstract; Sec. 1; Sec. 6", "WRONG AS PRINTED")
def size_range(seed: int) -> Evidence:
    """model sizes range from 0.12B to 2B

    Correct: from 66 M (Table 4) to 1.7 B by the sizes of Table 3
    """
    least, most = min(r.printed for r in (*TABLE_3, *TABLE_4)), round(millions(TABLE_3[-1]))
    detail = "least and largest, in millions: Table 4, and the sizes of Table 3"
    return wrong([120.0, 2000.0], [float(least), float(most)], detail, corrected=[66.0, 1683.0])


@claim("sharpness-disparity/ffn-majority", "Sec. 6.2", "WRONG AS PRINTED", uses=[Transformer])
def ffn_majority(seed: int) -> Evidence:
    """'FFN blocks comprise the majority of model parameters', LLaMA 0.25B

    Correct: 42 %: the largest type, but embedding and head together are larger; it is the majority of the blocks' parameters,
    75 %
    """
    row = TABLE_3[2]
    ffn = 3 * row.d_model * row.d_ff * row.depth / 1e6
    ends = 2 * VOCABULARY * row.d_model / 1e6
    share, of_blocks = ffn / millions(row), ffn / (millions(row) - ends)
    detail = f"FFN {ffn:.0f} M, embedding and head {ends:.0f} M, share of the blocks {100 * of_blocks:.0f} %"
    return violated(0.5, share, detail, corrected=of_blocks)
