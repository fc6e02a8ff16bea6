"""What ``pyproject.toml`` says about the package, and what pages and errors say about that."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
tomllib = pytest.importorskip("tomllib")  # Python 3.11 on


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def test_errors_and_pages_name_extras_that_exist(project: dict[str, Any]) -> None:
    files = [*(ROOT / "hessiankit").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra
        for file in files
        for found in re.findall(r"hessiankit\[(\w+(?:,\w+)*)\]", file.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert {"models", "training"} <= named
    assert named <= set(project["optional-dependencies"])


def test_the_page_about_installing_lists_the_extras(project: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(project["optional-dependencies"])


def test_dev_takes_in_all_extras(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    inside = {
        one
        for part in ("dev", "test")
        for found in re.findall(r"hessiankit\[(.*?)\]", " ".join(extras[part]))
        for one in found.split(",")
    }
    assert inside == set(extras) - {"dev"}


def test_what_is_asked_for_is_pinned(project: dict[str, Any]) -> None:
    pins = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    asked = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    assert names(asked) - {"hessiankit"} <= pins


def test_no_install_takes_a_torchvision(project: dict[str, Any]) -> None:
    """It is built for one torch, and one that does not fit stops transformers from being imported."""
    queue = names(project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra])
    seen: set[str] = set()
    while queue:
        seen.add(one := queue.pop())
        try:
            asked = requires(one) or []
        except PackageNotFoundError:  # one of an extra that is not installed here
            continue
        queue |= names([line for line in asked if "extra ==" not in line]) - seen
    assert {"torch", "transformers", "numpy"} <= seen
    assert not seen & {"torchvision", "timm", "curvlinops-for-pytorch", "backpack-for-pytorch"}


def test_the_list_for_curvlinops_is_whole() -> None:
    """It is installed without its dependencies; those are in the list, or ours."""
    lines = (ROOT / "curvlinops.txt").read_text(encoding="utf-8").splitlines()
    listed = names([line for line in lines if not line.startswith("#")])
    assert listed <= names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    for one in sorted(listed):
        pytest.importorskip("curvlinops")
        asked = names([line for line in requires(one) or [] if "extra ==" not in line])
        assert asked - listed <= {"torch", "numpy", "scipy", "mpmath", "torchvision", "colorama"}, one
