"""The plugin that pytest finds when hessiankit is installed: ``pytest --hessian`` prints the comparisons that tests made."""

from __future__ import annotations

import sys
from typing import Any

import pytest

_BY_WORKERS: list[tuple[str, str, bool]] = []


def pytest_addoption(parser: Any) -> None:
    """Add the option."""
    parser.getgroup("hessiankit").addoption(
        "--hessian", action="store_true", help="print every Hessian that assert_hessian_matches compared, with its worst error"
    )


def _compared() -> list[tuple[str, str, bool]]:
    """Return the comparisons of this process: the test, the verdict, and whether the results agree."""
    testing = sys.modules.get("hessiankit.verify.testing")
    return [] if testing is None else [(test, report.verdict, bool(report)) for test, report in testing.COMPARED]


def pytest_sessionfinish(session: Any) -> None:
    """Send the comparisons to the controller, if this process is a worker of pytest-xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["hessiankit"] = _compared()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the comparisons of a worker of pytest-xdist."""
    _BY_WORKERS.extend(getattr(node, "workeroutput", {}).get("hessiankit", ()))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print one line per comparison."""
    if not config.getoption("--hessian"):
        return
    terminalreporter.section("hessiankit")
    compared = [*_compared(), *_BY_WORKERS]
    if not compared:
        terminalreporter.write_line("no test called hessiankit.verify.testing.assert_hessian_matches")
    for test, verdict, agree in compared:
        terminalreporter.write_line(f"{test}: {verdict}", red=not agree, green=agree)
