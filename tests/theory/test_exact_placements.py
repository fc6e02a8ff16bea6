"""Whole blocks in exact arithmetic: a sample passes, and every variant occurs. Wrong formulas are those of ``test_exact.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hessiankit.blocks import PLACEMENTS, TransformerBlock
from hessiankit.theory.exact.block_structure import BlockStructure, structure_of
from hessiankit.theory.exact.blocks import PLACEMENT_CASES, VARIANTS, placement_case, structures
from hessiankit.theory.exact.check import ExactRow, check_exact_blocks, run_case
from hessiankit.theory.exact.residues import VALUES

PRE = BlockStructure("pre", "rmsnorm")
QUICK = (
    PRE,
    BlockStructure("lns", "rmsnorm", "gelu", affine=False),
    BlockStructure("skipinit", "rmsnorm", causal=True, affine=False),
    BlockStructure("olmo2", "rmsnorm", "swiglu", n_heads=2, n_kv_heads=1, rotary=True, causal=True, affine=False),
)


def run(structure: BlockStructure) -> ExactRow:
    return run_case(placement_case(structure))


@pytest.mark.parametrize("structure", QUICK, ids=str)
def test_all_first_and_second_derivatives_are_exact(structure: BlockStructure) -> None:
    row = run(structure)
    assert row.passed, row.note
    assert 0 < row.degree < 400
    assert 0 < row.chance < 1e-14
    assert f"{row.entries} entries equal at a random point mod 2^61-1; degree <= {row.degree}" in row.note


def branches_times_a_float(b: Any, X: Any) -> Any:
    Y = X + 0.3 * b.attention(b.norm_1(X))
    return Y + 0.3 * b.feedforward(b.norm_2(Y))


def test_a_placement_of_ones_own_may_multiply_with_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACEMENTS, "own", replace(PLACEMENTS["pre"], name="own", equation=branches_times_a_float))
    (row,) = check_exact_blocks(TransformerBlock(8, 8, placement="own", norm="rmsnorm", activation="gelu", affine=False))
    assert row.passed, row.note


def test_kinks_multiply_the_chance_by_the_patterns_of_signs() -> None:
    row = run(PRE)
    assert PRE.sizes["d_ff"] == 2
    assert row.chance == 16 * row.degree / VALUES


def test_every_placement_equation_and_variant_has_a_case() -> None:
    found = list(structures())
    assert {s.placement for s in found} == set(PLACEMENTS)
    assert {s.placed.equation for s in found} == {p.equation for p in PLACEMENTS.values()}
    assert len(PLACEMENT_CASES) == len({case.name for case in PLACEMENT_CASES}) == len(found)
    unplaced = {replace(s, placement="", layer=1, n_layers=1) for s in found}
    assert unplaced == set(VARIANTS)
    for name, values in {
        "norm": {"layernorm", "rmsnorm"},
        "activation": {"relu", "leaky_relu", "gelu", "swiglu"},
        "n_kv_heads": {1, 2},
        "norm_scope": {None, "full"},
        **{flag: {False, True} for flag in ("causal", "rotary", "bias", "attention_bias", "output_projection", "affine")},
    }.items():
        assert {getattr(s, name) for s in VARIANTS} == values
    layers = {(s.placement, s.placed.name) for s in found if s.n_layers > 1}
    assert {("mix-ln", "post"), ("mix-ln", "pre"), ("hybridnorm*", "pre-qkv-pre"), ("hybridnorm*", "hybridnorm")} <= layers


@pytest.mark.parametrize("structure", [VARIANTS[1], VARIANTS[3], VARIANTS[6]], ids=str)
def test_the_structure_of_a_small_block_is_the_one_it_was_made_with(structure: BlockStructure) -> None:
    placed = replace(structure, placement="pre-qkvc-post")
    found = structure_of(placed.small())
    assert replace(found, output_projection=placed.output_projection) == placed
    assert structure_of(TransformerBlock(8, 3, placement="lns", layer=3, n_layers=5)) == BlockStructure(
        "lns", layer=3, n_layers=5
    )
