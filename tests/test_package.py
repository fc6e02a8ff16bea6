"""What ``pyproject.toml`` says about the package, and what pages and errors say about that."""

from __future__ import annotations

import re
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
    assert {"curvlinops", "models", "training"} <= named
    assert named <= set(project["optional-dependencies"])


def test_the_page_about_installing_lists_the_extras(project: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(project["optional-dependencies"])


def test_dev_takes_in_all_extras(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    (inside,) = re.findall(r"hessiankit\[(.*?)\]", " ".join(extras["dev"]))
    assert set(inside.split(",")) == set(extras) - {"dev"}


def test_what_is_asked_for_is_pinned(project: dict[str, Any]) -> None:
    pins = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    asked = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    assert names(asked) - {"hessiankit"} <= pins


def test_a_plain_install_leaves_torch_alone(project: dict[str, Any]) -> None:
    tied = {"torchvision", "timm", "curvlinops-for-pytorch", "backpack-for-pytorch"}  # torchvision is built for one torch
    assert not names(project["dependencies"]) & tied
