"""Tests of a package that is not installed are skipped where they are parametrized by its name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("curvlinops"):
        return
    for item in items:
        if hasattr(item, "callspec") and "curvlinops" in item.callspec.params.values():
            item.add_marker(pytest.mark.skip(reason="curvlinops is not installed"))
