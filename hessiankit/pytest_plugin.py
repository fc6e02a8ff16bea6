"""The plugin that pytest finds when hessiankit is installed: ``pytest --hessian`` prints what the tests compared.

It imports nothing of hessiankit before a test does.
"""

from __future__ import annotations

import sys
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add the option."""
    parser.getgroup("hessiankit").addoption(
        "--hessian", action="store_true", help="print every Hessian that assert_hessian_matches compared, with its worst error"
    )


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print one line a comparison."""
    if not config.getoption("--hessian"):
        return
    terminalreporter.section("hessiankit")
    testing = sys.modules.get("hessiankit.testing")
    compared = [] if testing is None else testing.COMPARED
    if not compared:
        terminalreporter.write_line("no test called hessiankit.testing.assert_hessian_matches")
    for one in compared:
        terminalreporter.write_line(f"{one.test}: {one.report.verdict}", red=not one.report, green=bool(one.report))
