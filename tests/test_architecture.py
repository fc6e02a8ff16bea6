"""The plan of the house in docs/architecture.md: arrows go down, modules form no circle, a class name means one thing."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("derivations", "hessiankit", "papers", "figures", "benchmarks")
LINES = 500


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


class Read(NamedTuple):
    """What the tests ask of a module: its imports of this repository, its classes, and tensors without a device."""

    imports: set[str]
    classes: set[str]
    unnamed: list[str]


MAKERS = "arange empty eye full linspace logspace ones rand randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros"


@cache
def modules() -> dict[str, Read]:
    """Name -> what is read of it."""
    gc.disable()  # it would walk through every node of every tree
    try:
        return {name: read(name, ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for name, path in FILES.items()}
    finally:
        gc.enable()


def read(name: str, nodes: Iterator[ast.AST]) -> Read:
    """Imports in functions and for type checkers too; the lazy top level apart."""
    imports, classes, unnamed = set[str](), set[str](), list[str]()
    for node in nodes:
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(home)):
                inner = {f"{home}.{alias.name}" for alias in node.names}
                imports |= (inner & FILES.keys()) or {home}
            case ast.ClassDef():
                classes.add(node.name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=maker)):
                if maker in MAKERS.split() and not {"device", "out", None} & {k.arg for k in node.keywords}:
                    unnamed.append(f"{name}:{node.lineno} {maker}")
    return Read((imports & FILES.keys()) - {name}, classes, unnamed)


def floors() -> dict[str, int]:
    """Room -> floor, as the page draws them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found, floor = {}, 0
    for line in page[page.index("```text") : page.index("textbook")].splitlines():
        floor = int(line[6:8]) if line.startswith("floor") else floor
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
    arrows = {(name, other) for name in FILES if room(name) in floor for other in modules()[name].imports}
    up = [(a, b) for a, b in arrows if room(a) != room(b) and not b.startswith("derivations")]
    up = [(a, b) for a, b in up if not (room(b) in floor and floor[room(b)] < floor[room(a)])]
    assert up == []
    assert [
        (a, b) for a in FILES if a.startswith("derivations") for b in modules()[a].imports if not b.startswith("derivations")
    ] == []


CORE = "support primitives tracing request blocks functions engine curvature landscape"


def test_no_number_needs_a_matrix_in_vec_r() -> None:
    """Of the textbook, the rooms that compute numbers import arithmetic alone."""
    rest, seen = [name for name in FILES if room(name) in CORE.split()], set[str]()
    while rest:
        name = rest.pop()
        rest += modules()[name].imports - seen
        seen |= modules()[name].imports
    assert {name for name in seen if name.startswith("derivations")} == {
        f"derivations.{name}" for name in ("activation_functions", "arrays", "rotary_angles", "scalar_functions")
    }


def test_only_figures_import_the_papers() -> None:
    importers = {name for name in FILES if any(other.split(".")[0] == "papers" for other in modules()[name].imports)}
    assert {name.split(".")[0] for name in importers} <= {"papers", "figures"}


def test_no_circles() -> None:
    try:
        TopologicalSorter({name: modules()[name].imports for name in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("wing", ["theory", "training"])
def test_parts_of_a_wing_form_no_circle(wing: str) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for name in FILES:
        if name.startswith(f"hessiankit.{wing}."):
            inside = {other.split(".")[2] for other in modules()[name].imports if other.startswith(f"hessiankit.{wing}.")}
            graph[name.split(".")[2]] |= inside - {name.split(".")[2]}
    assert sum(map(len, graph.values())) > 1
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(set)
    for name in FILES:
        if name.startswith(("hessiankit", "derivations")):
            for one in modules()[name].classes:
                homes[one].add(name)
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


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Torch's default device decides nothing: only the parameters of blocks, as torch's own modules', are made there."""
    ours = [
        name for name in FILES if name.startswith(("hessiankit.", "derivations.")) and not name.startswith("hessiankit.blocks")
    ]
    assert [call for name in ours for call in modules()[name].unnamed] == []
