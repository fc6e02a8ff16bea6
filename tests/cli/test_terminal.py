"""What a newcomer sees in a terminal: nothing is wider than it, nothing is cut, and a result takes a screen."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from monitoring_cases import Noisy, pair, train
from rich.cells import cell_len
from torch import nn

import hessiankit as hk
from hessiankit.cli.main import main
from hessiankit.support import tables
from hessiankit.support.tables import LINES

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
SMALL = """
import torch
from hessiankit import Transformer
def model(): return Transformer(256, 8, 16, 2, n_heads=2, causal=True, max_len=16)
"""


def shown(width: int, run: Callable[[], Any]) -> list[str]:
    """Return the lines of output and errors in a terminal of so many columns, none of which is wider or cut."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written), redirect_stderr(written):
        patch.setattr(tables, "terminal_width", lambda: width)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
        run()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written.getvalue()).replace(
        "\r", "\n"
    )  # what a bar wrote over itself are lines
    lines = [line.rstrip() for line in plain.removesuffix("\n").split("\n")]
    for line in lines:
        assert cell_len(line) <= width, line
        assert "…" not in line
    return lines


def numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def block(**options: Any) -> hk.TransformerBlock:
    torch.manual_seed(0)
    return hk.TransformerBlock(
        4, 6, **{"n_heads": 2, "placement": "hybridnorm", "bias": True, "activation": "gelu", **options}
    ).double()


def measured(folder: Path) -> hk.Monitor:
    noisy = Noisy()
    train(noisy, 4, hk.Monitor(noisy, pair(), folder / "run.jsonl", every=1, what={"norms": {}, "sharpness": {"draws": 2}}))
    return hk.Monitor.read(folder / "run.jsonl")


X, T = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (1, 2))
DEEP = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(9))).double()
MODEL = hk.Transformer(13, 8, 12, 2, n_heads=2, causal=True, max_len=8, seed=0)
RESULTS: dict[str, Callable[[Path], Any]] = {
    "check": lambda _: hk.check(block(placement="post"), X, T, formulas=False),
    "check of a deep module": lambda _: hk.check(DEEP, X[..., :3], T[..., :3]),
    "hessian": lambda _: hk.hessian(block(), X, T),
    "hessian of a deep module": lambda _: hk.hessian(DEEP, X[..., :3], T[..., :3]),
    "lazy hessian": lambda _: hk.hessian(block(), X, T, lazy=True),
    "forecast": lambda _: hk.hessian(block(), X, T, dry_run=True),
    "diagonal": lambda _: hk.hessian_diagonal(block(), X, T),
    "frobenius norms": lambda _: hk.frobenius_norms(block(), X, T),
    "bounds": lambda _: hk.bounds(block(placement="post", n_heads=1, activation="relu"), X, T),
    "derivation": lambda _: hk.derive(block(placement="post"), wrt=("W_Q", "W_V")),
    "derivation of a loss": lambda _: hk.derive(block(placement="post"), wrt=("W_Q",), loss="mse"),
    "sharpness": lambda _: hk.sharpness(MODEL, pair(), draws=2),
    "block types": lambda _: hk.block_types(MODEL),
    "groups": lambda _: hk.blockwise_lr(MODEL, lr=1e-3, ratios="measured", sharpness=hk.sharpness(MODEL, pair(), draws=2)),
    "monitor": measured,
    "depth": lambda _: hk.depth_diagnostics(MODEL, pair()),
    "identities": lambda _: hk.check(block(), X, T).identities,
}
COMMANDS = {
    "hessian": "hessian --placement pre --heads 2",
    "hessian --dry-run": "hessian --model terminal_models:model --text text.txt --dry-run",
    "derive": "derive --wrt W_Q W_V",
    "derive --format explain": "derive --wrt W_Q --format explain",
    "bounds": "bounds",
    "sharpness": "sharpness --model terminal_models:model --text text.txt --batch 2 --length 8 --draws 2 --layers --tensors --exact",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_takes_a_screen_its_repr_a_line_and_no_number_is_cut(name: str, tmp_path: Path) -> None:
    """What stands in a terminal stands in the complete text too, and the table has all of it at any width."""
    result = RESULTS[name](tmp_path)
    complete = result.table() if hasattr(result, "table") else str(result)
    for width in (80, 120):
        lines = shown(width, lambda: print(result))
        assert len(lines) <= LINES, width
        assert len(repr(result).splitlines()) == 1
        text = "\n".join(line for line in lines if not re.search(r"\d+ of \d+ rows|^ +first$", line))
        assert numbers(text) <= numbers(complete), width
        if hasattr(result, "table"):
            assert numbers(complete) <= numbers("\n".join(shown(width, lambda: print(result.table())))), width
        if (name, width) == ("check", 80):
            rows = [line.split("  ")[0] for line in lines if " x " in line.split("  ")[0] and "inputs" not in line]
            assert len(rows) == len(set(rows)) >= 5
            assert "columns left out at this width: method" in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_no_wider_than_the_terminal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("terminal_models.py").write_text(SMALL)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    assert shown(80, lambda: main(COMMANDS[name].split()) and pytest.fail("exit code"))


@pytest.mark.slow
def test_the_main_job_is_a_screen_and_a_half_and_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hessiankit.cli.study.QUICK", {"d_model": 4, "d_ff": 5, "patch": 4, "steps": 20, "batch": 2})
    command = ["study", "--quick", "--seed", "3", "--out", ".", "--json", "all.json"]
    lines = shown(80, lambda: main(command) and pytest.fail("exit code"))
    text = " ".join(" ".join(lines).split())
    assert text.count("3 of 136 rows, largest error first") == 4
    assert "Hessian 2 of 4: " in text
    assert text.count("PASSED: ") == 4
    assert sum(" x " in line and "e-" in line for line in lines) == 12
    report = json.loads(Path("report.json").read_text())
    assert report["passed"] is True
    assert json.loads(Path("all.json").read_text()).keys() == report.keys()
    assert (report["options"]["d_ff"], report["options"]["seed"]) == (5, 3)
    assert [(r["loss"], r["stage"]) for r in report["reports"]] == [
        ("mse", "initialisation"), ("mse", "trained"), ("cross_entropy", "initialisation"), ("cross_entropy", "trained"),
    ]  # fmt: skip
    assert 0.1 < report["validation_accuracy"]["cross_entropy"] < 1
    assert {path.name for path in Path.cwd().glob("*.png")} == {"hessian_mse.png", "hessian_cross_entropy.png"}


def test_a_terminal_is_told_from_a_pipe() -> None:
    code = "from hessiankit.support.tables import *; say(table(('name', 'value', 'least'), [('a' * 30, '1' * 20, 'x' * 20)], drop=('least',)))"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs) as process:
        assert process.wait() == 0
    written = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert "columns left out at this width: least" in written
    assert max(map(len, written.split("\r\n"))) <= 60
    assert "xxx" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
