"""Settings: model sizes, initialisation, hyperparameters (Secs. 4.1, 4.4, App. B, Tables 6-7)."""

from __future__ import annotations

from hessiankit.blocks import Transformer
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.evidence import small
from hessiankit.ledger.hybridnorm.tables_printed import TABLE_6, VOCABULARY
from hessiankit.ledger.registry import claim


def parameter_count(d: int, d_ff: int, heads: int, kv_heads: int, layers: int, vocabulary: int = VOCABULARY) -> int:
    """Return the parameters of a tied Pre-Norm model with SwiGLU, RMSNorm gains and a final norm."""
    attention = 2 * d * d + 2 * d * (d // heads) * kv_heads
    return vocabulary * d + layers * (attention + 3 * d * d_ff + 2 * d) + d


def confirmed_count() -> bool:
    """Whether the formula counts what the code builds, on a small model."""
    model = Transformer(11, 8, 6, 3, 4, "pre", n_kv_heads=2, norm="rmsnorm", activation="swiglu", rotary=True)
    return sum(p.numel() for p in model.parameters()) == parameter_count(8, 6, 4, 2, 3, 11)


@claim("hybridnorm/table6-sizes", "Table 6; Sec. 4.1", "HOLDS", uses=[Transformer])
def sizes(seed: int) -> Evidence:
    """the sizes of the five dense models give 151M, 285M, 550M, 543M and 'approximately 1.27 billion' parameters"""
    printed = {"151M": 151e6, "285M": 285e6, "550M": 550e6, "543M": 543e6, "1.2B": 1.27e9}
    errors = [abs(parameter_count(*TABLE_6[name]) / number - 1) for name, number in printed.items()]
    return small([*errors, 0.0 if confirmed_count() else 1.0], "five models; the count itself against a small model", below=0.01)


# Initialisation -------------------------------------------------------------------------------------------------------
