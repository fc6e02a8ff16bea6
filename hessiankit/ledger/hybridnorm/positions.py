"""App. E: formulas for positions of the norms, Eqs. 35-52."""

from __future__ import annotations

from hessiankit.blocks import placements as eq
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import wrong
from hessiankit.ledger.hybridnorm.definitions import mha, rms_norm, swiglu
from hessiankit.ledger.hybridnorm.equations import HEADS, generic, make
from hessiankit.ledger.registry import claim


@claim("hybridnorm/pre-qkv-pre-in-words", "Sec. 4.4, Normalization Position", "WRONG AS PRINTED", uses=[eq.pre])
def pre_qkv_pre_in_words(seed: int) -> Evidence:
    """in Pre-QKV-Pre, 'the FFN layer utilizes Post-Norm'

    Correct: Pre-Norm, as in Eq. 48 and in the name; Pre-QKV-Post is the other one
    """
    draw = Draw(seed)
    block, told = make("pre-qkv-pre"), make("pre-qkv-post")
    W, X = generic(block, draw), draw.normal(3, 6)
    told.load_state_dict(block.state_dict())
    Y = mha(rms_norm(X), W, HEADS, "qkv") + X
    return wrong(told(X), swiglu(rms_norm(Y), W) + Y, "the words against Eqs. 47-48", corrected=block(X), above=0.02)
