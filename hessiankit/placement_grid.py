"""``hessiankit check --placements``: the exact Hessian of every norm placement, in every combination of options.

Each case is a language model with hundreds of parameters, of one block or three; :func:`hessiankit.check` compares its
Hessian, block pair by block pair, with automatic differentiation by two routes that share nothing, and with the exact identities
of its structure. Finished cases are lines of a file, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from hessiankit.errors import InputError
from hessiankit.line_file import LineFile
from hessiankit.placement_cases import Case, build
from hessiankit.progress import Tell
from hessiankit.verify.check import check

AGAINST = ("reverse-over-reverse", "jvp(grad)")
"""Two routes without a common path, both right for every operation of these models (docs/routes.md)."""

RTOL = 1e-10
"""Of each block pair's largest entry, in float64."""


@dataclass(frozen=True)
class Finished:
    """What :func:`hessiankit.check` said of a case.

    Attributes:
        case: The case.
        error: Largest difference from either reference, relative to the largest entry of its block pair.
        identities: Number of exact identities that were confirmed and tested.
        identity_error: The largest error of these.
        passed: Whether all agrees, and no operation had to be left to automatic differentiation.
        verdict: The report's own line.
        kinds: The kinds of parameters, such as ``attention.W_Q``, without the index of the block.
        size: Number of parameters.
        seconds: Time taken.
        version: Digest of the code and torch's version.
    """

    case: Case
    error: float
    identities: int
    identity_error: float
    passed: bool
    verdict: str
    kinds: tuple[str, ...]
    size: int
    seconds: float
    version: str


def run_case(case: Case) -> Finished:
    """Check one case: all block pairs, along one generic direction a parameter."""
    start = time.perf_counter()
    model, ids, target = build(case)
    report = check(model, ids, target, loss=case.loss, against=AGAINST, rtol=RTOL, directions=1)
    found = report.hessian
    verdict = report.verdict
    if found.fallbacks:
        verdict = f"FAILED: left to automatic differentiation: {', '.join(found.fallbacks)}"
    return Finished(
        case=case,
        error=report.max_rel_error,
        identities=len(report.identities.rows),
        identity_error=report.identities.max_rel_error if report.identities.rows else 0.0,
        passed=report.passed and not found.fallbacks,
        verdict=verdict,
        kinds=tuple(sorted({_kind(name) for name in found.names})),
        size=len(found.matrix),
        seconds=time.perf_counter() - start,
        version=version(),
    )


def _kind(name: str) -> str:
    """Return a parameter's name without the index of its block.

    >>> _kind("blocks.2.attention.W_Q")
    'blocks.attention.W_Q'
    """
    return ".".join(part for part in name.split(".") if not part.isdigit())


def run_grid(todo: list[Case], lines: Path, *, jobs: int = 1, tell: Tell | None = None) -> list[Finished]:
    """Run the cases that ``lines`` does not hold yet, append each when it is finished, and return all of ``todo`` in its order.

    Lines of other code or another torch do not count: their cases are done anew.

    Args:
        todo: The cases.
        lines: The file of finished cases, made where it is missing.
        jobs: How many processes share the work, each with one thread.
        tell: Called with (placement, cases finished, cases in all).

    Raises:
        InputError: If the file cannot be read or written.
    """
    try:
        done = {finished.case: finished for finished in read_lines(lines) if finished.version == version()}
        left = [case for case in todo if case not in done]
        with LineFile(lines) as file, _runner(jobs) as run:
            for k, finished in enumerate(run(left)):
                done[finished.case] = finished
                file.write(json.dumps(asdict(finished)))
                if tell is not None:
                    tell(finished.case.placement, len(todo) - len(left) + k + 1, len(todo))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"placement_grid: {lines} cannot be used: {why}; pass another folder with --out") from error
    return [done[case] for case in todo]


@contextmanager
def _runner(jobs: int) -> Iterator[Callable[[list[Case]], Iterable[Finished]]]:
    """Yield a function that runs cases in this process, or spread over several."""
    if jobs == 1:
        yield lambda left: map(run_case, left)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare_worker) as pool:  # whose exit ends the processes at once
        yield lambda left: pool.imap_unordered(run_case, left)


def _prepare_worker() -> None:
    """Take one thread, and leave Ctrl-C to the process that shares out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def read_lines(path: Path) -> Iterator[Finished]:
    """Yield the finished cases of a file; a last line that was cut off by an interrupt is skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            yield Finished(**{**entry, "case": Case(**entry["case"]), "kinds": tuple(entry["kinds"])})
        except (ValueError, TypeError, KeyError):
            continue


@cache
def version() -> str:
    """Return torch's version and a digest of the code of ``hessiankit`` and ``derivations``."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root.parent / "derivations").rglob("*.py")]):
        digest.update(path.read_bytes())
    return f"torch {torch.__version__}, code {digest.hexdigest()[:12]}"
