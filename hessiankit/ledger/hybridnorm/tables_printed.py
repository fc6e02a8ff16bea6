"""The numbers of Tables 1-6 as printed; the starred variant is "HybridNorm*"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Rows: TypeAlias = Mapping[str, tuple[float, ...]]

TABLE_1_TASKS = ("BasicArithmetic", "HellaSwag", "SciQ", "ARC-C", "ARC-E", "PIQA", "OpenbookQA", "COPA")
TABLE_1: Rows = {
    "Pre-Norm": (44.10, 63.41, 91.80, 39.20, 69.82, 75.19, 38.40, 82.00),
    "HybridNorm": (44.12, 64.22, 91.88, 39.13, 71.05, 74.72, 38.88, 82.00),
    "HybridNorm*": (47.21, 65.12, 91.38, 37.06, 71.79, 75.72, 39.16, 85.78),
}
TABLE_1_AVERAGES = {"Pre-Norm": 62.99, "HybridNorm": 63.25, "HybridNorm*": 64.15}

TABLE_2_TASKS = ("HellaSwag", "ARC-C", "ARC-E", "PIQA", "WinoGrande", "OpenbookQA", "BoolQ", "COPA")
TABLE_2: Rows = {
    "Pre-Norm": (69.94, 39.92, 73.37, 77.82, 63.34, 42.37, 67.47, 85.40),
    "HybridNorm": (70.71, 42.27, 75.77, 78.06, 64.58, 43.18, 68.41, 86.00),
}
TABLE_2_AVERAGES = {"Pre-Norm": 64.95, "HybridNorm": 66.12}

TABLE_3 = {  # (method, initialisation): loss, perplexity on C4
    ("Pre-Norm", "Normal"): (2.75, 20.29),
    ("Pre-Norm", "Depth-Scaled"): (2.76, 20.49),
    ("Pre-Norm", "Megatron"): (2.76, 20.44),
    ("HybridNorm", "Normal"): (2.76, 20.44),
    ("HybridNorm", "Depth-Scaled"): (2.76, 20.40),
    ("HybridNorm", "Megatron"): (2.74, 20.00),
}

TABLE_4_BLOCKS: tuple[Rows, ...] = (  # loss, C4, Pile, minus HellaSwag: the smaller the better
    {
        "QKVC-Post": (2.74, 20.05, 10.34, -52.68),
        "QKC-Post": (2.73, 20.00, 10.31, -52.26),
        "KV-Post": (2.74, 20.11, 10.38, -52.10),
        "KC-Post": (2.75, 20.34, 10.47, -51.15),
    },
    {
        "Pre-QKV-Post": (2.74, 20.13, 10.37, -52.65),
        "Pre-QKV-Pre": (2.74, 19.97, 10.33, -53.05),
        "Pre-QK-Pre": (2.75, 20.22, 10.43, -52.29),
        "QKV-Pre": (2.74, 19.96, 10.33, -52.57),
    },
    {
        "Post-Norm": (2.76, 20.43, 10.57, -51.20),
        "Pre-Norm": (2.75, 20.30, 10.48, -51.97),
        "Mix-LN": (2.76, 20.43, 10.56, -51.29),
        "Post-Pre": (2.75, 20.26, 10.46, -51.19),
        "Pre-Post": (2.74, 20.15, 10.40, -52.42),
    },
)
TABLE_4_OURS: Rows = {"HybridNorm": (2.74, 20.00, 10.29, -53.35), "HybridNorm*": (2.73, 19.85, 10.25, -53.36)}
TABLE_4: Rows = {name: row for block in TABLE_4_BLOCKS for name, row in block.items()}

TABLE_5: dict[int, Rows] = {  # layers: loss, C4, Pile, minus HellaSwag, minus PIQA
    16: {
        "Post-Norm": (2.76, 20.43, 10.57, -51.20, -71.80),
        "Pre-Norm": (2.75, 20.30, 10.48, -51.97, -71.14),
        "HybridNorm": (2.74, 20.00, 10.29, -53.35, -71.96),
        "HybridNorm*": (2.73, 19.85, 10.25, -53.36, -71.15),
    },
    29: {
        "Pre-Norm": (2.73, 19.88, 10.31, -53.86, -71.63),
        "HybridNorm": (2.72, 19.67, 10.18, -54.89, -72.62),
        "HybridNorm*": (2.71, 19.52, 10.10, -54.54, -72.01),
    },
}

TABLE_6 = {  # d, d_ff, heads, key and value heads, layers; 100278 tokens, tied
    "151M": (768, 2048, 16, 4, 12),
    "285M": (1024, 4096, 16, 4, 12),
    "550M": (1536, 4096, 16, 4, 16),
    "543M": (1024, 4096, 16, 4, 29),
    "1.2B": (2048, 9192, 32, 8, 16),
}
VOCABULARY = 100278


def better(rows: Rows, than: tuple[float, ...]) -> list[str]:
    """Return the "row, column" pairs in which a row beats ``than``; smaller is better.

    >>> better({"a": (1.0, 5.0)}, (2.0, 4.0))
    ['a, column 1']
    """
    return [f"{name}, column {k + 1}" for name, row in rows.items() for k, v in enumerate(row) if v < than[k]]
