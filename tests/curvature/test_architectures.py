"""Other people's architectures: a few of every kind here, all of them under the marker ``exhaustive``; docs/models.md has the table."""

from __future__ import annotations

import math

import pytest
import torch

import hessiankit as hk

pytest.importorskip("transformers")

from benchmarks import models
from benchmarks.architectures import build

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
    [*SOME[:4], *(pytest.param(*one, marks=pytest.mark.slow) for one in SOME[4:])],
    ids=lambda x: x.replace("/", " "),
)
def test_some(name: str, attention: str) -> None:
    assert_passed(name, attention)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", models.every_name())
def test_every_one(name: str) -> None:
    for attention in models.attentions(name):
        assert_passed(name, attention)


def test_errors_are_seen() -> None:
    """A product that is wrong in one small parameter fails."""
    model = build("causal/gptj").model
    sizes = [p.numel() for p in models.leaves(model)]
    right = torch.randn(sum(sizes), dtype=torch.float64)
    wrong = right.clone()
    wrong[-1] *= 1 + 1e-6
    assert models.error(right, right, model) == 0.0
    assert 1e-8 < models.error(wrong, right, model) < 1e-5
    wrong[-1] = math.nan
    assert models.error(wrong, right, model) == math.inf


def test_page_of_rows() -> None:
    rows = [
        models.Row("causal/one", "eager", 10, 2e-15, 1e-9, 3e-8, 0.02, 0.03, ("aten.special_i0e.default",)),
        models.Row("causal/two", "sdpa", 10, reason="hessian_operator: no"),
    ]
    page = models.page(rows)
    assert "| causal/one | eager | 10 | 2e-15 | 1e-09 | 3e-08 | 2e-02 | 3e-02 | aten.special_i0e.default |" in page
    assert "| causal/two | sdpa | hessian_operator: no |" in page
    assert [row.passed for row in (*rows, models.Row("x", "eager", float64=1e-9))] == [True, True, False]


def test_command(tmp_path, capsys) -> None:
    out, page = tmp_path / "rows.jsonl", tmp_path / "models.md"
    asked = ["--only", "causal/opt", "--attention", "sdpa", "--out", str(out), "--markdown", str(page)]
    assert models.main(asked) == 0
    out.write_text(out.read_text() + '{"name": "causal/o')  # a line that an interrupt cut off
    assert models.main(asked) == 0  # from what is finished
    assert capsys.readouterr().out.count("causal/opt (sdpa): float64") == 1
    assert "| causal/opt | sdpa |" in page.read_text()
    assert models.main(["--only", "no such model", "--out", str(out)]) == 2
    assert "--list" in capsys.readouterr().err


def test_dense_hessian_and_diagonal_of_one() -> None:
    """The same numbers by the other calls, where the model promotes float32."""
    instance = build("causal/gptj")
    some = {"params": ["transformer.h.0.attn.*", "transformer.h.0.ln_1.*"], "loss": None}
    found = hk.hessian(instance.model, instance.batch, **some)
    scale = float(found.matrix.abs().max())
    products = hk.hessian_operator(instance.model, instance.batch, **some).to_matrix()
    diagonal = hk.hessian_diagonal(instance.model, instance.batch, **some).flat
    assert (found.matrix - products).abs().max() <= 1e-5 * scale
    assert (found.matrix.diagonal() - diagonal).abs().max() <= 1e-5 * scale
