"""Tables 1-4 and App. A.1: what arithmetic can check."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hessiankit.blocks import Transformer
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.evidence import agrees, counts, exceeded, false, off, readings, relative_error, small
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


def size_row(row: Row) -> None:
    """Enter the row of a model whose printed size follows from its sizes."""
    key = row.name.lower().replace(" (", "-").replace(")", "")

    @claim(
        f"sharpness-disparity/table{row.table}-{key}",
        f"Table {row.table}, {row.name}",
        "HOLDS",
        statement=f"{row.printed} M parameters with $d_{{model}} = {row.d_model}$, $d_{{FF}} = {row.d_ff}$, {row.n_heads} heads, "
        f"depth {row.depth}",
        uses=[Transformer],
    )
    def entered(seed: int) -> Evidence:
        found = millions(row)
        return small(abs(found / row.printed - 1), f"{found:.1f} M counted", below=0.01)


@claim("sharpness-disparity/table3-llama-2b", "Table 3, LLaMA (2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_2b(seed: int) -> Evidence:
    """2025 M parameters with $d_{model} = 2048$, $d_{FF} = 8192$, 32 heads, depth 22

    Correct: 1683 M; depth 27 would give 2018 M
    """
    row = TABLE_3[-1]
    found, deeper = millions(row), millions(row, 27)
    detail = f"{found:.1f} M counted, {deeper:.1f} M at depth 27"
    return off(abs(found / row.printed - 1), detail, corrected=relative_error(round(found), 1683), above=0.1)


@claim("sharpness-disparity/table4-llama-0.2b", "Table 4, LLaMA (0.2B)", "WRONG AS PRINTED", uses=[Transformer])
def llama_02b(seed: int) -> Evidence:
    """200 M parameters with $d_{model} = 768$, $d_{FF} = 3072$, 16 heads, depth 8

    Correct: 125 M; 8 heads and depth 16, the two swapped, give 200 M, and 768 / 16 is a head of 48
    """
    row = TABLE_4[1]
    found, swapped = millions(row), millions(row._replace(n_heads=8), 16)
    detail = f"{found:.1f} M counted, {swapped:.1f} M with heads and depth swapped"
    return off(abs(found / row.printed - 1), detail, corrected=relative_error(round(swapped), row.printed), above=0.1)


for _row in (*TABLE_3[:-1], TABLE_4[0], *TABLE_4[2:]):
    size_row(_row)


@claim("sharpness-disparity/size-range", "Abstract; Sec. 1; Sec. 6", "WRONG AS PRINTED")
def size_range(seed: int) -> Evidence:
    """model sizes range from 0.12B to 2B

    Correct: from 66 M (Table 4) to 1.7 B by the sizes of Table 3
    """
    least, most = min(r.printed for r in (*TABLE_3, *TABLE_4)), round(millions(TABLE_3[-1]))
    return false((least, most), (120, 2000), "least and largest, in millions")


TABLE_1 = (
    (52.69, 22.87, 68.71, 36.13, 19.40, 55.17, 77.60),
    (54.29, 25.34, 69.53, 38.00, 22.60, 59.83, 81.60),
)
"""AdamW, Blockwise LR."""


@claim("sharpness-disparity/table1-better", "Table 1, its numbers", "HOLDS")
def table1_better(seed: int) -> Evidence:
    """Blockwise LR has the better number in each of the seven columns"""
    return counts(sum(b > a for a, b in zip(*TABLE_1, strict=True)), 7, "columns in which it is better")


TABLE_2 = {"w/o": 2.834, "Emb": 2.818, "Emb & FFN": 2.791, "all four": 2.784, "Norm": 2.837}


@claim("sharpness-disparity/table2-differences", "Table 2, its numbers; Sec. 6.2", "HOLDS")
def table2_differences(seed: int) -> Evidence:
    """-0.016, -0.043, -0.050, +0.003 against 2.834; FFN adds 0.043 - 0.016 = 0.027"""
    found = [TABLE_2[name] - TABLE_2["w/o"] for name in ("Emb", "Emb & FFN", "all four", "Norm")]
    found.append(TABLE_2["Emb"] - TABLE_2["Emb & FFN"])
    return agrees(found, [-0.016, -0.043, -0.050, 0.003, 0.027], "last digit for last digit")


@claim("sharpness-disparity/table2-each", "Sec. 6.2", "VAGUE")
def table2_each(seed: int) -> Evidence:
    """'applying Blockwise LR to any block consistently improves performance'

    Correct: only Emb is applied alone; FFN is added to it, QK and VO together on top, with 0.007
    """
    found = {
        "Emb alone": 0.016,
        "FFN on top of it": 0.027,
        "QK and VO on top of both": TABLE_2["Emb & FFN"] - TABLE_2["all four"],
    }
    return readings(found, "what the table shows of each block")


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
    return exceeded(0.5 / share, detail, corrected=0.5 / of_blocks)


@claim("sharpness-disparity/epochs", "App. A.1, OpenWebText pre-training", "OMITTED")
def epochs(seed: int) -> Evidence:
    """sequences of 1024, batches of 480, 50 000 or 100 000 steps

    Correct: 24.6 or 49.2 billion tokens: several passes over OpenWebText, which has about 9 billion
    """
    tokens = [1024 * 480 * steps / 1e9 for steps in (50_000, 100_000)]
    return agrees(
        tokens,
        [24.576, 49.152],
        f"billions of tokens; {tokens[0] / 9.04:.1f} and {tokens[1] / 9.04:.1f} passes over 9.04 billion",
    )
