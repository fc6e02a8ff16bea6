"""``python -m benchmarks mutants``: how many small errors in the code do the tests see, and how many does ``check`` see alone?"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks.mutants.drawn import drawn, known_tests
from benchmarks.mutants.listing import Mutant, Stale, every, room_of
from benchmarks.mutants.running import KILLED, STALE, SURVIVED, UNDECIDED, UNTESTED, Verdict, Workshop
from hessiankit.support.errors import InputError
from hessiankit.support.jsonl import append_records, read_records
from hessiankit.support.tables import as_text, table

ROOT = Path(__file__).parents[2]
CHECKED = ("derivations", "primitives", "engine")
"""The rooms whose mutants ``check`` is meant to see, but for bounds and what bears on no derivative that it compares."""
STATES = (KILLED, SURVIVED, UNDECIDED, STALE, UNTESTED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks mutants",
        description="Put listed errors into a copy of the code, one at a time, and run the tests that are meant to see each. A "
        "verdict is kept: the same command again continues. Exit code 0: every mutant was killed; 1: not; 2: an option cannot "
        "be used; 130: interrupted (Ctrl-C).",
    )
    top.add_argument("--by", choices=("tests", "check"), default="tests", help="what is to see them: the tests of each, or "
                     f"hessiankit.check alone on a fixed set of modules, mutants of {', '.join(CHECKED)}")  # fmt: skip
    top.add_argument("--only", nargs="+", metavar="ROOM", help="rooms, or files")
    top.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    top.add_argument("--random", type=int, metavar="N", help="in place of the lists, N at random positions, drawn by --seed")
    top.add_argument("--seed", type=int, default=0, help="of --sample and --random (default: %(default)s)")
    top.add_argument("--list", action="store_true", help="say what there is and what no longer applies, and stop")
    top.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    top.add_argument("--limit-seconds", type=float, default=120.0, help="for one run (default: %(default)g)")
    top.add_argument(
        "--out", type=Path, default=Path("results/mutants.jsonl"), help="verdicts, one a line (default: %(default)s)"
    )
    return top


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options ask for.

    Raises:
        InputError: There are none.
    """
    if options.random is not None:
        files = [name for name in known_tests(ROOT) if not options.only or set(options.only) & {name, room_of(name)}]
        return drawn(ROOT, files, options.random, options.seed)
    mutants = [
        m for m in every() if options.by == "tests" or (m.room in CHECKED and "bounds" not in m.file and not m.beyond_check)
    ]
    if options.only:
        known = {name for m in mutants for name in (m.room, m.file)}
        unknown = sorted(set(options.only) - known)
        if unknown:
            rooms = ", ".join(sorted({m.room for m in mutants}))
            raise InputError(f"mutants: --only {' '.join(unknown)} has none; choose of {rooms}, or a file with mutants")
        mutants = [m for m in mutants if {m.room, m.file} & set(options.only)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    return mutants


def digest(mutant: Mutant, by: str) -> str:
    """Return a digest of the mutant, its file, and its tests."""
    tests = mutant.tests if by == "tests" else ("benchmarks/mutants/checks.py",)
    parts = [mutant.key, by, *tests, *mutant.environment]
    for name in (mutant.file, *(test.partition("::")[0] for test in tests)):
        path = ROOT / name
        parts.append(path.read_text(encoding="utf-8") if path.is_file() else "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stored(path: Path) -> dict[str, Verdict]:
    """Return the verdicts in a file by their digests."""
    return dict(read_records(path, lambda r: (r["digest"], Verdict(r["state"], r["by"], r["seconds"]))))


def measured(mutants: Sequence[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, Verdict]]:
    """Yield the verdict on every mutant, kept ones first."""
    before = stored(options.out)
    digests = {mutant: digest(mutant, options.by) for mutant in mutants}  # the working tree may change while copies run
    open_: list[Mutant] = []
    for mutant in mutants:
        verdict = before.get(digests[mutant])
        if verdict is None or verdict.state in (STALE, UNTESTED):
            open_.append(mutant)
        else:
            yield mutant, verdict
    if not open_:
        return
    free: SimpleQueue[Workshop] = SimpleQueue()
    append_records(options.out)
    with ThreadPoolExecutor(options.jobs) as pool, contextlib.ExitStack() as stack:
        for _ in range(min(options.jobs, len(open_))):
            free.put(stack.enter_context(Workshop(ROOT, options.limit_seconds, check=options.by == "check")))
        lock = threading.Lock()

        def one(mutant: Mutant) -> tuple[Mutant, Verdict]:
            workshop = free.get()
            try:
                verdict = workshop.run(mutant)
            finally:
                free.put(workshop)
            record = {"digest": digests[mutant], "mutant": str(mutant), **vars(verdict)}
            with lock:
                append_records(options.out, record)
            return mutant, verdict

        try:
            yield from pool.map(one, open_)
        finally:  # interrupted: the end of the workshops ends the runs that the pool waits for
            pool.shutdown(wait=False, cancel_futures=True)


def report(found: Sequence[tuple[Mutant, Verdict]]) -> str:
    """Return the kill rate by room, and below it one by one what was not killed."""
    rooms: dict[str, Counter[str]] = {}
    for mutant, verdict in found:
        rooms.setdefault(mutant.room, Counter())[verdict.state] += 1
    total = sum(rooms.values(), Counter[str]())
    lines = [_line(room, rooms[room]) for room in sorted(rooms)] + ([_line("all", total)] if len(rooms) > 1 else [])
    parts: list[object] = [table(("room", "mutants", *STATES, "kill rate"), lines)]
    for state in STATES[1:]:
        for mutant, verdict in found:
            if verdict.state == state:
                why = f" ({verdict.by})" if verdict.by and state in (STALE, UNTESTED) else ""
                parts.append(f"{state}: {mutant}{why}" + (f"\n    {mutant.remark}" if mutant.remark else ""))
    return as_text(*parts)


def _line(room: str, states: Counter[str]) -> tuple[str, ...]:
    tried = states.total() - states[STALE] - states[UNTESTED]
    rate = f"{100 * states[KILLED] / tried:.0f} %" if tried else "-"
    return (room, str(states.total()), *(str(states[s]) if states[s] else "" for s in STATES), rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    top = parser()
    options = top.parse_args(arguments)
    if options.jobs < 1 or options.limit_seconds <= 0 or min(options.sample or 1, options.random or 1) < 1:
        top.error("--jobs, --limit-seconds, --sample and --random are to be positive")
    found: list[tuple[Mutant, Verdict]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy and the processes end with this one
    try:
        mutants = chosen(options)
        if options.list:
            print(listed(mutants))
            return 0
        for number, (mutant, verdict) in enumerate(measured(mutants, options), 1):
            found.append((mutant, verdict))
            print(f"{number}/{len(mutants)} {verdict.state:<9} {verdict.seconds:6.1f} s  {mutant}  {verdict.by}", file=sys.stderr)
    except InputError as error:
        print(str(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mutants: cannot write --out {options.out}: {error.strerror}; choose another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(report(found))
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report(found))
    if options.by == "check" and not options.only:
        aside = [m for m in every() if m.room in CHECKED and m.beyond_check]
        print("\n".join(f"not asked of check: {m}\n    {m.beyond_check}" for m in aside))
    return 0 if all(verdict.state == KILLED for _, verdict in found) else 1


def listed(mutants: Sequence[Mutant]) -> str:
    """Return the mutants one a line, those whose text has gone marked."""
    lines = []
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
            lines.append(str(mutant))
        except Stale as stale:
            lines.append(f"{STALE}: {mutant} ({stale})")
    rooms = Counter(mutant.room for mutant in mutants)
    return "\n".join([*lines, f"{len(lines)} mutants: " + ", ".join(f"{room} {n}" for room, n in sorted(rooms.items()))])
