"""Run benchmarks: ``python -m benchmarks --list | NAME... | --all [--quick]``, or ``... mutants``, ``... routes``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import real_sizes
from benchmarks.mutants import command as mutants
from benchmarks.plan import Benchmark, Plan
from benchmarks.problems import DTYPES, GPT2, RECURRENCE, names, read
from benchmarks.report import write
from benchmarks.routes import command as routes
from benchmarks.runner import Outcome, measure
from benchmarks.suites import ALIASES, BENCHMARKS, attention, scale
from benchmarks.suites.sharpness import MODELS
from benchmarks.timing import CLOCKS
from hessiankit.support.errors import HessiankitError, InputError

WRONG, USAGE, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed and memory beside other routes, and check every result that is compared. A finished cell is "
        "kept: the same command again continues. Exit code 0: measured; 1: a closed form was not confirmed, or a cell failed; "
        "2: an option cannot be used; 130: interrupted (Ctrl-C). 'mutants' for a NAME measures the tests, 'routes' audits torch: "
        "each has its own --help.",
    )
    top.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}")
    top.add_argument("--all", action="store_true", help="every benchmark")
    top.add_argument("--list", action="store_true", help="say what there is, and stop")
    top.add_argument("--dry-run", action="store_true", help="say how many cells there are and how long they may take, and stop")
    top.add_argument(
        "--report", type=Path, metavar="PAGE", help="at last write what is in --out into this Markdown page, plots beside it"
    )
    top.add_argument("--quick", action="store_true", help="the smallest cells, 2 rounds, one thread, float64")
    top.add_argument("--out", type=Path, default=Path("results/benchmarks"), help="folder to write to (default: %(default)s)")
    top.add_argument("--threads", type=_positive, nargs="+", help="threads, each its own cells (default: 1 2)")
    top.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="dtypes, each its own cells (default: float64 float32)")
    top.add_argument("--repeats", type=_positive, help="timed rounds (default: 5; with --quick 2)")
    top.add_argument(
        "--sizes",
        "--problems",
        nargs="+",
        metavar="PROBLEM",
        help=f"of: {', '.join(names())}, L16d8f32, small-x2, ...; of scale: {', '.join(scale.MODELS)}, attention-L2048, ...",
    )
    top.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"of scale: {', '.join(scale.METHODS)}, {scale.USUAL[1]}, ...",
    )
    top.add_argument(
        "--memory-gib", type=float, default=8.0, help="of scale: what a method may allocate (default: %(default)g GiB)"
    )
    top.add_argument("--batches", type=_positive, nargs="+", metavar="B", help="batch sizes (default: 1 8 32 128)")
    top.add_argument(
        "--limit-seconds", type=float, default=120.0, help="what the timed rounds of one cell may take (default: %(default)g)"
    )
    top.add_argument(
        "--budget-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="stop a cell after so long and mark it as skipped: over budget (default: 6 times the limit, at least 600)",
    )
    top.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    top.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: %(default)s)")
    top.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="time of what is compared on a CPU (default: %(default)s)"
    )
    top.add_argument("--in-process", action="store_true", help="cells in this process rather than each in its own")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan that the options describe.

    Raises:
        InputError: They cannot be used.
    """
    for size in options.sizes or ():
        if size not in (*GPT2, RECURRENCE, *MODELS, *attention.PROBLEMS) and real_sizes.read(size) is None:
            read(size)
    for method in options.methods or ():
        scale.options_of(method)
    if options.memory_gib <= 0:
        raise InputError(f"benchmarks: --memory-gib {options.memory_gib:g} leaves no memory; pass more than 0")
    if "bfloat16" in (options.dtype or ()) and options.names != ["scale"]:
        raise InputError("benchmarks: --dtype bfloat16 is of scale alone; leave it out, or the other names")
    if options.limit_seconds <= 0:
        raise InputError(f"benchmarks: --limit-seconds {options.limit_seconds:g} leaves no time; pass more than 0")
    if options.budget_seconds < 0:
        raise InputError(f"benchmarks: --budget-seconds {options.budget_seconds:g} is negative; pass more than 0, or nothing")
    if options.device == "cuda" and options.clock == "process":
        raise InputError("benchmarks: --clock process does not count a GPU's time; leave the option out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("benchmarks: --device cuda, but torch sees no GPU; leave the option out")
    quick = options.quick
    return Plan(
        quick=quick,
        threads=tuple(options.threads or ((1,) if quick else (1, 2))),
        dtypes=tuple(options.dtype or (("float64",) if quick else ("float64", "float32"))),
        sizes=tuple(options.sizes or ()),
        batches=tuple(options.batches or ()),
        repeats=options.repeats or (2 if quick else 5),
        limit_seconds=options.limit_seconds,
        compile=not (options.no_compile or quick),
        device=options.device,
        clock=options.clock,
        budget_seconds=options.budget_seconds,
        methods=tuple(options.methods or ()),
        memory_gib=options.memory_gib,
    )


def bounds(benchmarks: Sequence[Benchmark], plan: Plan) -> list[str]:
    """Return how many cells each benchmark has, and what they take at most."""
    counts = {benchmark.name: len(benchmark.cells(plan)) for benchmark in benchmarks}
    lines = [f"{name:<8} {count:>4} cells, {count * plan.limit_seconds / 3600:.1f} h of rounds" for name, count in counts.items()]
    total = sum(counts.values())
    most = f"at most {plan.budget:g} s each, {total * plan.budget / 3600:.1f} h in all"
    return [*lines, f"{'all':<8} {total:>4} cells, {total * plan.limit_seconds / 3600:.1f} h of rounds; {most}"]


def report(page: Path, results: Path) -> bool:
    """Write a page of what was measured; tell whether that could be done."""
    try:
        if write(page, results, BENCHMARKS, lambda what: print(what, file=sys.stderr)):
            print(f"benchmarks: wrote {page}", file=sys.stderr)
            return True
        print(f"benchmarks: --report finds no results in {results}; measure first, or pass --out FOLDER", file=sys.stderr)
    except HessiankitError as error:
        print(str(error), file=sys.stderr)
    except OSError as error:
        print(f"benchmarks: cannot write --report {page}: {error.strerror}; choose another path", file=sys.stderr)
    return False


def _stop(*_: object) -> None:
    """Take a request to end as Ctrl-C, so that the process of the cell ends too."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["mutants"]:
        return mutants.main(arguments[1:])
    if arguments[:1] == ["routes"]:
        return routes.main(arguments[1:])
    top = parser()
    options = top.parse_args(arguments)
    if options.list:
        for benchmark in BENCHMARKS.values():
            print(f"{benchmark.name:<8} {benchmark.summary}")
        return 0
    wanted = list(BENCHMARKS) if options.all else list(dict.fromkeys(ALIASES.get(name, name) for name in options.names))
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        top.error(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    if not wanted and options.report is None:
        top.error(f"name a benchmark, or pass --all, --list or --report; there are: {', '.join(BENCHMARKS)}")
    try:
        plan = plan_of(options)
        if options.dry_run:
            print("\n".join(bounds([BENCHMARKS[name] for name in wanted], plan)))
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        print(f"benchmarks: cannot write into --out {options.out}: {error.strerror}; choose another folder", file=sys.stderr)
        return USAGE
    except HessiankitError as error:
        print(str(error), file=sys.stderr)
        return USAGE
    outcomes: list[Outcome] = []
    threads, before = torch.get_num_threads(), None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _stop)
    try:
        for name in wanted:
            outcomes.append(measure(BENCHMARKS[name], plan, options.out, isolate=not options.in_process))
            if outcomes[-1].interrupted:
                return INTERRUPTED
    except HessiankitError as error:
        print(str(error), file=sys.stderr)
        return USAGE
    except OSError as error:
        reason = f"{error.strerror}; make room, or pass another --out: finished cells are kept"
        print(f"benchmarks: cannot write into --out {options.out}: {reason}", file=sys.stderr)
        return USAGE
    finally:
        torch.set_num_threads(threads)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if options.report is not None and not report(options.report, options.out):
        return USAGE
    return WRONG if any(outcome.doubtful for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
