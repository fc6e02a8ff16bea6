"""The plan of the house in docs/architecture.md: arrows go down, modules form no circle, a class name means one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("derivations", "hessiankit", "papers", "figures", "benchmarks")
LINES = 500


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def imported(name: str) -> set[str]:
    """The modules of this repository that a module imports, in functions and for type checkers too; the lazy top level apart."""
    found: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & FILES.keys()) or {node.module}
    return (found & FILES.keys()) - {name}


def floors() -> dict[str, int]:
    """Room -> floor, as the page draws them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found, floor = {}, 0
    for line in page[page.index("floor 7") : page.index("textbook")].splitlines():
        floor = int(line[6]) if line.startswith("floor") else floor
        found |= dict.fromkeys(re.findall(r"(?:^|\s{2,})([a-z_]+)\s{2,}(?=\S)", line[8:]), floor)
    return found


def room(name: str) -> str:
    return name.split(".")[1] if name.startswith("hessiankit.") else ""


def test_the_page_names_every_room() -> None:
    rooms = {path.name for path in (ROOT / "hessiankit").iterdir() if (path / "__init__.py").exists()}
    assert floors().keys() == rooms
    loose = {path.name for path in (ROOT / "hessiankit").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"}


def test_imports_go_down() -> None:
    floor = floors()
    arrows = {(name, other) for name in FILES if room(name) in floor for other in imported(name)}
    up = [(a, b) for a, b in arrows if room(a) != room(b) and not b.startswith("derivations")]
    up = [(a, b) for a, b in up if not (room(b) in floor and floor[room(b)] < floor[room(a)])]
    assert up == []
    assert [(a, b) for a in FILES if a.startswith("derivations") for b in imported(a) if not b.startswith("derivations")] == []


def test_only_figures_import_the_papers() -> None:
    importers = {name for name in FILES if any(other.split(".")[0] == "papers" for other in imported(name))}
    assert {name.split(".")[0] for name in importers} <= {"papers", "figures"}


def test_no_circles() -> None:
    try:
        TopologicalSorter({name: imported(name) for name in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(set)
    for name in FILES:
        if name.startswith(("hessiankit", "derivations")):
            for node in ast.walk(tree(name)):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].add(name)
    assert {name: sorted(where) for name, where in homes.items() if len(where) > 1} == {}


def test_no_file_is_too_long() -> None:
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in sizes.items() if n > LINES and not name.startswith("papers")} == {}


def test_tests_lie_in_folders_that_mirror_the_packages() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    top = {path.name for path in tests if len(path.parts) == 1 and path.name.startswith("test_")}
    assert top == {"test_architecture.py", "test_package.py", "test_public_names.py"}
    assert {path.parts[0] for path in tests if len(path.parts) > 1} <= {*floors(), *PACKAGES, "docs", "device", "robustness"}
    assert {name: n for name, n in Counter(path.name for path in tests).items() if n > 1} == {}  # folders are no packages


MAKERS = "arange empty eye full linspace logspace ones rand randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros"


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Torch's default device decides nothing: only the parameters of blocks, as torch's own modules', are made there."""
    unnamed = []
    for name in FILES:
        if name.startswith(("hessiankit.", "derivations.")) and not name.startswith("hessiankit.blocks"):
            for call in (node for node in ast.walk(tree(name)) if isinstance(node, ast.Call)):
                maker = call.func
                of_torch = isinstance(maker, ast.Attribute) and isinstance(maker.value, ast.Name) and maker.value.id == "torch"
                if of_torch and maker.attr in MAKERS.split() and not {"device", "out", None} & {k.arg for k in call.keywords}:
                    unnamed.append(f"{name}:{call.lineno} {maker.attr}")
    assert unnamed == []
