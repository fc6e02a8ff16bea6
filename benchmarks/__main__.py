"""Run a benchmark: ``python -m benchmarks dense_hessian [--quick]``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.dense_hessian import CLOSED, CONFIGURATIONS, Measurement, markdown, measure
from hessiankit.environment import environment
from hessiankit.errors import HessiankitError
from hessiankit.progress import progress_bar

WRONG, USAGE, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = [configuration.name for configuration in CONFIGURATIONS]
    top = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed.")
    commands = top.add_subparsers(dest="benchmark", required=True)
    dense = commands.add_parser(
        "dense_hessian",
        help="the dense Hessian by closed form beside reverse-over-reverse, jvp(grad), torch.func.hessian and curvlinops",
        description="Time the dense Hessian by closed form and by its peers on the same problems, in turn, in one process. "
        "Prints a Markdown table and writes it, with every number behind it as JSON. Ctrl-C keeps the rounds that are "
        "finished. Exit code 0: measured; 1: the closed form was not confirmed; 2: an option cannot be used; 130: interrupted.",
    )
    dense.add_argument("--quick", action="store_true", help=f"configuration {names[0]!r} alone, 2 rounds: a few seconds")
    dense.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"configurations to measure, of: {', '.join(names)}"
    )
    dense.add_argument("--repeats", type=_positive, help="rounds (default: 5; with --quick 2)")
    dense.add_argument("--threads", type=_positive, help="threads of torch (default: its own choice)")
    dense.add_argument("--out", type=Path, default=Path("results/benchmarks"), help="folder to write to (default: %(default)s)")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        print(f"benchmarks: cannot write into --out {options.out}: {error.strerror}; choose another folder", file=sys.stderr)
        return USAGE
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or threads)
    try:
        return _dense_hessian(options)
    except HessiankitError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return USAGE
    finally:
        torch.set_num_threads(threads)


def _dense_hessian(options: argparse.Namespace) -> int:
    """Measure, write after every round, print, and return the exit status."""
    wanted = options.only or [c.name for c in (CONFIGURATIONS[:1] if options.quick else CONFIGURATIONS)]
    chosen = [c for c in CONFIGURATIONS if c.name in wanted]
    rounds = options.repeats or (2 if options.quick else 5)
    where, interrupted = environment(), False
    found: dict[str, Measurement] = {}
    try:
        with progress_bar() as tell:
            for configuration in chosen:
                for measurement in measure(configuration, rounds, tell):
                    found[configuration.name] = measurement
                    _write(options.out, list(found.values()), where, complete=False)
                print(f"{configuration.name}: {rounds} round(s) measured", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
    if not found:
        print("benchmarks: interrupted before the first round was finished; nothing was written", file=sys.stderr)
        return INTERRUPTED
    print(_write(options.out, list(found.values()), where, complete=not interrupted))
    print(f"wrote {options.out / 'dense_hessian.json'} and {options.out / 'dense_hessian.md'}", file=sys.stderr)
    if interrupted:
        print("benchmarks: interrupted; the table holds the rounds that were finished", file=sys.stderr)
        return INTERRUPTED
    doubtful = [name for name, m in found.items() for row in m.rows if row.method == CLOSED and row.status != "right"]
    if doubtful:
        print(f"benchmarks: the closed form was not confirmed on {', '.join(doubtful)}: the JSON says why", file=sys.stderr)
        return WRONG
    return 0


def _write(out: Path, measurements: list[Measurement], where: dict[str, object], *, complete: bool) -> str:
    """Write what is known so far as JSON and as Markdown, and return the latter."""
    content = {
        "benchmark": "dense_hessian",
        "complete": complete,
        "environment": where,
        "configurations": [m.to_dict() for m in measurements],
    }
    (out / "dense_hessian.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    text = markdown(measurements, where)
    (out / "dense_hessian.md").write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
