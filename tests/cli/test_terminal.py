"""What a newcomer sees in a terminal: nothing is wider than it, nothing is cut, and a result takes a screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from hessiankit.support import tables
from hessiankit.support.tables import LINES

WIDTHS = (80, 100, 120)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
SMALL = """
import torch
from hessiankit import Transformer
def model(): return Transformer(256, 8, 16, 2, n_heads=2, causal=True, max_len=16)
"""


@dataclass(frozen=True)
class Printed:
    """What stood in a terminal.

    Attributes:
        name: Of the result or the command; a result's ``.table()`` is ``"NAME.table"``.
        width: Columns of the terminal.
        lines: Without control sequences; what a progress bar wrote over itself are lines too.
    """

    name: str
    width: int
    lines: tuple[str, ...]


def printed_at(name: str, width: int, run: Callable[[], Any]) -> Printed:
    """Run with output and errors in a terminal of so many columns."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written), redirect_stderr(written):
        patch.setattr(tables, "terminal_width", lambda: width)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
        run()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written.getvalue()).replace("\r", "\n")
    return Printed(name, width, tuple(line.rstrip() for line in plain.split("\n")))


def results(folder: Path) -> dict[str, Any]:
    """Return one of each public result, of small problems."""
    import torch
    from monitoring_cases import Noisy, pair, train
    from test_tuning_verdict import BASE, BETTER, LOST, SAME, WEAK, WORSE, report_of
    from torch import nn

    import hessiankit as hk
    import papers
    from benchmarks.routes.table import routes
    from hessiankit.verify.identities import identities
    from papers.curvature_gap.attack import attack
    from papers.curvature_gap.loss_surface import loss_surface_bound

    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 6, n_heads=2, placement="hybridnorm", bias=True, activation="gelu").double()
    x, t = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(9))).double()
    other = {name: p + 0.1 for name, p in block.named_parameters()}
    model = hk.Transformer(13, 8, 12, 2, n_heads=2, causal=True, max_len=8)
    tokens = torch.randint(13, (4, 9))
    batch = (tokens[:, :-1], tokens[:, 1:])
    sharp = hk.sharpness(model, batch, draws=2)
    noisy = Noisy()
    monitor = hk.Monitor(noisy, pair(), folder / "run.jsonl", every=1, draws=2)
    train(noisy, 4, monitor)
    found = papers.claims()
    return {
        "check": hk.check(hk.TransformerBlock(4, 5, n_heads=2, bias=True).double(), x, t, formulas=False),
        "check of a deep module": hk.check(deep, torch.randn(5, 3), torch.randn(5, 3)),
        "hessian": hk.hessian(block, x, t),
        "hessian of a deep module": hk.hessian(deep, torch.randn(5, 3).double(), torch.randn(5, 3).double()),
        "lazy hessian": hk.hessian(block, x, t, lazy=True),
        "forecast": hk.hessian(block, x, t, dry_run=True),
        "diagonal": hk.hessian_diagonal(block, x, t),
        "frobenius norms": hk.frobenius_norms(block, x, t),
        "bounds": hk.bounds(hk.TransformerBlock(4, 5).double(), x, t),
        "attack": attack(2, seed=0),
        "loss surface": loss_surface_bound(block, torch.randn(30, 3, 4).double(), torch.randn(30, 3, 4).double(), other),
        "derivation": hk.derive(hk.TransformerBlock(4, 5), wrt=("W_Q", "W_V")),
        "derivation of a loss": hk.derive(hk.TransformerBlock(4, 5), wrt=("W_Q",), loss="mse"),
        "sharpness": sharp,
        "block types": hk.block_types(model),
        "groups": hk.blockwise_lr(model, lr=1e-3, ratios="measured", sharpness=sharp),
        "ledger": found,
        "claim": found[0],
        "ledger report": papers.claims(id="hybridnorm/eq1*").run(),
        "monitor": hk.Monitor.read(folder / "run.jsonl"),
        "depth": hk.depth_diagnostics(model, batch),
        "identities": identities(block, x, t),
        "routes": routes(["layer_norm", "softmax"]),
        "tuning": report_of([BASE, WORSE, BETTER, SAME, WEAK, LOST]),
    }


COMMANDS = {
    "$ study --quick": "study --quick",
    "$ hessian": "hessian --placement pre --heads 2",
    "$ hessian --dry-run": "hessian --model terminal_models:model --text text.txt --dry-run",
    "$ derive": "derive --wrt W_Q W_V",
    "$ derive --format explain": "derive --wrt W_Q --format explain",
    "$ bounds": "bounds",
    "$ papers attack": "papers attack 2",
    "$ sharpness": "sharpness --model terminal_models:model --text text.txt --batch 2 --length 8 --draws 2 --layers --tensors --exact",
    "$ papers list": "papers list --paper hybridnorm",
    "$ papers run": "papers run --id hybridnorm/eq1*",
    "$ papers show": "papers show hybridnorm/eq19",
    "$ routes": "benchmarks routes --operation softmax",
    "$ papers placements": "papers placements --placement hybridnorm --sample 1 --out placements",
    "$ papers tune-lr": "papers tune-lr --quick --jobs 1 --seeds 2 --tuning-seeds 1 --grid 0.002 0.004 --text text.txt",
    "$ monitor": "monitor run.jsonl",
}
AT_ALL_WIDTHS = ("$ papers list", "$ papers show", "$ monitor")
"""Commands that compute nothing; the others run at one width only."""


def all_printed(folder: Path, patch: pytest.MonkeyPatch, complete: dict[str, str]) -> Iterator[Printed]:
    """Print every result, and run every command; put into ``complete`` what results print where there is no terminal."""
    from test_tuning_runs import TINY

    from benchmarks.__main__ import main as of_benchmarks
    from hessiankit.cli.main import main
    from papers.__main__ import main as of_papers

    patch.setattr("papers.experiments.tuning.experiment.QUICK", TINY)
    patch.setattr("hessiankit.cli.study.QUICK", {"d_model": 4, "d_ff": 5, "patch": 4, "steps": 20, "batch": 2})
    packages = {"papers": of_papers, "benchmarks": of_benchmarks}
    for name, result in results(folder).items():
        for width in WIDTHS:
            yield printed_at(name, width, lambda result=result: print(result))  # type: ignore[misc]
            yield printed_at(f"{name}.repr", width, lambda result=result: print(repr(result)))  # type: ignore[misc]
            if hasattr(result, "table"):
                yield printed_at(f"{name}.table", width, lambda result=result: print(result.table()))  # type: ignore[misc]
        complete[name] = result.table() if hasattr(result, "table") else str(result)
    patch.chdir(folder)
    (folder / "terminal_models.py").write_text(SMALL)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    for name, line in COMMANDS.items():
        for width in WIDTHS if name in AT_ALL_WIDTHS else WIDTHS[:1]:
            codes: list[int] = []
            package, _, rest = line.partition(" ")
            program, words = (packages[package], rest.split()) if package in packages else (main, line.split())
            yield printed_at(name, width, lambda run=program, words=words, codes=codes: codes.append(run(words)))  # type: ignore[misc]
            assert codes == [0], (name, codes)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Printed], dict[str, str]]:
    """All that is printed, and what the results are where there is no terminal."""
    complete: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "papers"))
        printed = list(all_printed(tmp_path_factory.mktemp("terminal"), patch, complete))
    return printed, complete


def numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


@pytest.mark.slow
def test_nothing_is_wider_than_the_terminal_or_cut(seen) -> None:
    shown = [one for one in seen[0] if not one.name.endswith(".repr")]
    assert {one.width for one in shown} == set(WIDTHS)
    assert {*COMMANDS} < {one.name for one in shown}
    for one in shown:
        for line in one.lines:
            assert cell_len(line) <= one.width, (one.name, one.width, line)
            assert "…" not in line, (one.name, one.width, line)


@pytest.mark.slow
def test_a_result_takes_a_screen_and_its_repr_a_line(seen) -> None:
    for one in seen[0]:
        lines = one.lines[:-1]  # the last one ends with the line break
        if one.name.endswith(".repr"):
            assert len(lines) == 1, lines
        elif one.name not in COMMANDS and not one.name.endswith(".table") and one.name != "claim":
            assert len(lines) <= LINES, (one.name, one.width, len(lines))


@pytest.mark.slow
def test_every_number_is_whole(seen) -> None:
    """What stands in a terminal stands in the complete text too: a number that was cut would not."""
    printed, complete = seen
    for one in printed:
        name = one.name.removesuffix(".table")
        if name not in complete:
            continue
        text = "\n".join(line for line in one.lines if not re.search(r"\d+ of \d+ rows|^ +first$", line))
        assert numbers(text) - numbers(complete[name]) <= set(), (one.name, one.width)
        for verdict in re.findall(r"\b(?:PASSED|FAILED|VIOLATED|HOLDS|WRONG AS PRINTED|NOT VERIFIED|0 to rounding)\b", text):
            assert verdict in complete[name], (one.name, verdict)


@pytest.mark.slow
def test_the_table_has_all_of_it_at_any_width(seen) -> None:
    printed, complete = seen
    tables = [one for one in printed if one.name.endswith(".table")]
    assert len(tables) >= len(WIDTHS) * 20
    for one in tables:
        missing = numbers(complete[one.name.removesuffix(".table")]) - numbers("\n".join(one.lines))
        assert missing == set(), (one.name, one.width, missing)


@pytest.mark.slow
def test_names_tell_rows_apart(seen) -> None:
    (check,) = [one for one in seen[0] if (one.name, one.width) == ("check", 80)]
    rows = [line.split("  ")[0] for line in check.lines if " x " in line.split("  ")[0] and "inputs" not in line]
    assert len(rows) == len(set(rows)) >= 5
    assert any(row.startswith("W_Q x ") for row in rows)
    assert any("columns left out at this width: method" in line for line in check.lines)


@pytest.mark.slow
def test_the_main_job_is_a_screen_and_a_half(seen) -> None:
    for one in seen[0]:
        if one.name == "$ study --quick":
            text = "\n".join(one.lines)
            assert "10 of 272 rows, largest error first" in " ".join(text.split())
            assert "Hessian 2 of 4: " in text
            assert " s left" in text
            assert "--table" in text
            assert "report.json" in text
            assert text.count("passed") == 4
            assert sum(" x " in line and "e-" in line for line in one.lines) == 10


def test_a_terminal_is_told_from_a_pipe() -> None:
    code = "from hessiankit.support.tables import *; say(table(('name', 'value', 'least'), [('a' * 30, '1' * 20, 'x' * 20)], drop=('least',)))"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs) as process:
        assert process.wait() == 0
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert "columns left out at this width: least" in shown
    assert max(map(len, shown.split("\r\n"))) <= 60
    assert "xxx" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
