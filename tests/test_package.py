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
    assert {"models", "study"} & named
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
    assert inside == set(extras) - {"dev", "notebooks"}  # JupyterLab is for readers; what runs notebooks is in dev itself


def test_what_is_asked_for_is_pinned(project: dict[str, Any]) -> None:
    pins = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    asked = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    assert names(asked) - {"hessiankit"} <= pins


@pytest.fixture(scope="module")
def installed(project: dict[str, Any]) -> set[str]:
    """What an install with all extras takes in, as far as it is here."""
    queue = names(project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra])
    found: set[str] = set()
    while queue:
        found.add(one := queue.pop())
        queue |= asked_by(one) - found
    return found


def asked_by(name: str) -> set[str]:
    try:
        return names([line for line in requires(name) or [] if "extra ==" not in line])
    except PackageNotFoundError:
        return set()


def test_no_install_takes_a_torchvision(installed: set[str]) -> None:
    """It is built for one torch, and one that does not fit stops transformers from being imported."""
    assert {"torch", "transformers", "numpy"} <= installed
    assert not installed & {"torchvision", "timm", "curvlinops-for-pytorch", "backpack-for-pytorch"}


def test_the_list_for_curvlinops_is_whole(installed: set[str]) -> None:
    """It is installed without its dependencies; those are in the list, or ours."""
    pytest.importorskip("curvlinops")
    lines = (ROOT / "curvlinops.txt").read_text(encoding="utf-8").splitlines()
    listed = names([line for line in lines if not line.startswith("#")])
    assert listed <= names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    for one in sorted(listed):
        assert asked_by(one) - listed - installed <= {"torchvision"}, one


def test_the_version_is_written_in_one_place() -> None:
    from hessiankit.support.package import __version__

    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert 'version = "' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.ruff]")[0]
