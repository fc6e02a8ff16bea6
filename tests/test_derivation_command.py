"""``hessiankit derive``: what it prints, in every format, and its exit codes."""

from __future__ import annotations

import json

import pytest

from hessiankit import TransformerBlock, derive
from hessiankit.cli.main import main


def printed(capsys, *arguments):
    assert main(["derive", *arguments]) == 0
    return capsys.readouterr().out


def test_text_is_what_python_prints(capsys):
    text = printed(capsys, "--placement", "hybridnorm", "--wrt", "query", "value", "--norm", "rmsnorm")
    block = TransformerBlock(4, 5, placement="hybridnorm", norm="rmsnorm")
    assert text == f"{derive(block, wrt=('query', 'value'))}\n"
    assert text.startswith("∂²Z/(∂W_Q ∂W_V) = (J_ZY ⊗ I_{d²}) Y_{Q,V}") or text.startswith("∂²Z/(∂W_Q ∂W_V) = (J_ZY")


def test_options_reach_the_block(capsys):
    options = ["--activation", "swiglu", "--heads", "4", "--kv-heads", "2", "--causal", "--rotary", "--bias"]
    text = printed(capsys, "--wrt", "gate", "key", "--placement", "pre", *options, "--format", "explain")
    assert "rows turned by R_l" in text
    assert "σ(U_G)" in text
    assert "b_G" in text
    assert "H_KV: heads of keys and values" in text
    lns = printed(capsys, "--placement", "lns", "--layer", "3", "--wrt", "down", "--format", "explain")
    assert lns.startswith("ℓ = 3\n")


def test_one_name_is_a_jacobian(capsys):
    assert printed(capsys, "--wrt", "down").startswith("∂Z/∂W_2 = J_Z (σ(U) ⊗ I_d)")


def test_json_and_latex(tmp_path, capsys):
    found = json.loads(printed(capsys, "--loss", "mse", "--format", "json"))
    assert found["wrt"] == ["attention.W_Q", "attention.W_V"]
    assert found["loss"] == "mse"
    assert found["lines"][0]["symbol"] == r"\frac{\partial^2 \mathcal{L}}{\partial W_Q\,\partial W_V}"
    assert len(found["terms"]) == 2
    path = tmp_path / "post.tex"
    assert printed(capsys, "--format", "latex", "--out", str(path)) == ""
    assert path.read_text(encoding="utf-8").startswith(r"\documentclass")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--placement", "hybrid"], "hessiankit: derive: --placement 'hybrid' is not known; did you mean"),
        (["--wrt", "queri"], "hessiankit: derive: --wrt 'queri' is not known; did you mean 'query'"),
        (["--wrt", "query", "key", "value"], "is not one or two names"),
        (["--loss", "mae"], "derive: --loss 'mae' is not known"),
        (["--kv-heads", "3", "--heads", "2"], "derive: --kv-heads 3 does not divide --heads 2"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2(arguments, message, capsys):
    assert main(["derive", *arguments]) == 2
    seen = capsys.readouterr().err
    assert message in seen
    assert seen.count("\n") == 1


@pytest.mark.parametrize("option", ["--heads", "--layer"])
def test_numbers_are_positive(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["derive", option, "0"])
    assert f"argument {option}: 0 is not a positive number" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    assert main(["derive", "--wrt", "down", "--out", str(tmp_path / "no" / "file")]) == 2
    assert "derive: cannot write" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["derive", "--help"])
    assert stop.value.code == 0
    assert "--kv-heads" in capsys.readouterr().out
