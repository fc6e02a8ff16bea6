"""A pseudo-terminal of a chosen width, and the child process that prints every result and runs every command in it.

``python tests/cli/terminal.py FOLDER`` is that child: it prints each thing at each width, after a line that names it, and writes into
``complete.json`` what the same prints where there is no terminal. Importing torch takes longer than all of it, so it is one process.
"""

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
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTHS = (80, 100, 120)
MARK = "@@"
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


def set_width(descriptor: int, columns: int) -> None:
    """Make a terminal so many columns wide."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def in_terminal(argv: list[str], columns: int = 80, **options: Any) -> tuple[int, str]:
    """Run a program with a terminal as its input, output and errors; return its exit code and what it wrote."""
    ours, theirs = pty.openpty()
    set_width(theirs, columns)
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, **options)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    return process.wait(), written.decode()


def sections(written: str) -> Iterator[Printed]:
    """Take apart what the child wrote."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written).replace("\r\n", "\n").replace("\r", "\n")
    for part in plain.split(f"{MARK} ")[1:]:
        head, *lines = part.split("\n")
        name, width = head.rsplit(" ", 1)
        yield Printed(name, int(width), tuple(line.rstrip() for line in lines))


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


def _child(folder: Path) -> None:
    from test_tuning_command import TINY

    from benchmarks.__main__ import main as of_benchmarks
    from hessiankit.cli import study
    from hessiankit.cli.main import main
    from papers.__main__ import main as of_papers
    from papers.experiments.tuning import experiment

    experiment.QUICK = TINY
    study.QUICK = {"d_model": 4, "d_ff": 5, "patch": 4, "steps": 20, "batch": 2}
    packages = {"papers": of_papers, "benchmarks": of_benchmarks}
    terminal, complete = sys.stdout, {}

    def print_at(name: str, width: int, run: Callable[[], Any]) -> None:
        set_width(terminal.fileno(), width)
        print(f"{MARK} {name} {width}", flush=True)
        run()
        sys.stdout.flush()

    for name, result in results(folder).items():
        for width in WIDTHS:
            print_at(name, width, lambda result=result: print(result))  # type: ignore[misc]
            print_at(f"{name}.repr", width, lambda result=result: print(repr(result)))  # type: ignore[misc]
            if hasattr(result, "table"):
                print_at(f"{name}.table", width, lambda result=result: print(result.table()))  # type: ignore[misc]
        with redirect_stdout(io.StringIO()):
            complete[name] = result.table() if hasattr(result, "table") else str(result)
    os.chdir(folder)
    (folder / "terminal_models.py").write_text(SMALL)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    for name, line in COMMANDS.items():
        for width in WIDTHS if name in AT_ALL_WIDTHS else WIDTHS[:1]:
            codes: list[int] = []
            name_of, _, rest = line.partition(" ")
            program, words = (packages[name_of], rest.split()) if name_of in packages else (main, line.split())
            print_at(name, width, lambda run=program, words=words, codes=codes: codes.append(run(words)))  # type: ignore[misc]
            assert codes == [0], (name, codes)
    (folder / "complete.json").write_text(json.dumps(complete))


if __name__ == "__main__":
    _child(Path(sys.argv[1]).resolve())
