"""The measurement of the tests by mutants: reading lists, verdicts in a copy of a tree, and what a run prints and keeps."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as front
from benchmarks.mutants import command
from benchmarks.mutants.drawn import drawn
from benchmarks.mutants.listing import Mutant, Stale, every, read
from benchmarks.mutants.running import KILLED, STALE, SURVIVED, UNDECIDED, UNTESTED, Workshop

LIST = """# a remark on nothing
@ room/code.py | tests/test_code.py KERNELS=0
# twice is four
- return a + a
+ return a * a

- first line
-     second line
+ one line
@ hessiankit/engine/sweep.py | tests/engine/test_block_rows.py
- x
+ y
"""


def test_reading_a_list(tmp_path: Path) -> None:
    path = tmp_path / "room.txt"
    path.write_text(LIST)
    one, two, three = read(path)
    change = ("return a + a", "return a * a")
    assert one == Mutant("room/code.py", *change, ("tests/test_code.py",), ("KERNELS=0",), "twice is four")
    assert two.old == "first line\n    second line"
    assert (one.room, three.room, replace(one, file="hessiankit/errors.py").room) == ("room", "engine", "top level")
    for name, text in (("room/code.py", "def f(a):\n    return a + a\n"), ("tests/test_code.py", "def test_three(): pass\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert one.applied(tmp_path) == "def f(a):\n    return a * a\n"
    assert replace(one, tests=("tests/test_code.py::test_three[a]",)).applied(tmp_path) == one.applied(tmp_path)
    for change, message in (
        ({"old": "a"}, "the old text occurs 3 times"),
        ({"file": "room/gone.py"}, "the old text occurs 0 times"),
        ({"tests": ("tests/test_code.py::test_th",)}, "no test tests/test_code.py::test_th"),
    ):
        with pytest.raises(Stale, match=message):
            replace(one, **change).applied(tmp_path)


def test_the_lists_cover_the_rooms() -> None:
    mutants = every()
    assert len(mutants) >= 150
    rooms = "blocks curvature derivations engine landscape papers primitives request support theory tracing training verify"
    assert set(rooms.split()) <= {m.room for m in mutants}
    assert [line for line in command.listed(mutants).splitlines() if line.startswith(STALE)] == []


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function, and its tests."""
    root = tmp_path / "tree"
    (root / "derivations").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "derivations" / "__init__.py").write_text("")
    (root / "derivations" / "code.py").write_text(
        "import time\n\n\ndef double(a):\n    time.sleep(0)\n    return a + a  # even\n"
    )
    (root / "tests" / "test_code.py").write_text(
        "from derivations.code import double\n\n\ndef test_three():\n    assert double(3) == 6\n"
    )
    (root / "tests" / "test_broken.py").write_text("def test_never():\n    raise AssertionError\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    monkeypatch.setattr(command, "ROOT", root)
    return root


def mutant(old: str, new: str, *tests: str) -> Mutant:
    return Mutant("derivations/code.py", old, new, tests or ("tests/test_code.py",))


@pytest.mark.exhaustive
def test_verdicts(tree: Path) -> None:
    (tree / "tests" / "test_slow.py").write_text("import time\n\n\ndef test_slow():\n    time.sleep(2)\n")
    with Workshop(tree, 5.0) as workshop:
        assert workshop.run(mutant("sleep(0)", "sleep(600)", "tests/test_code.py", "tests/test_slow.py")).state == UNDECIDED
        workshop.limit = 40.0
        endless = workshop.run(mutant("sleep(0)", "sleep(600)"))
        assert (endless.state, endless.by.startswith("out of time, ")) == (KILLED, True)
        workshop.limit = 300.0
        assert workshop.run(mutant("a + a", "a * a")).by == "tests/test_code.py::test_three"
        assert workshop.run(mutant("# even", "# odd")).state == SURVIVED
        assert workshop.run(mutant("a - a", "a")).state == STALE
        assert workshop.run(mutant("a + a", "a", "tests/test_gone.py")).state == STALE
        assert workshop.run(mutant("a + a", "a", "tests/test_broken.py")).state == UNTESTED
        assert workshop.run(mutant("def double(a)", "def double(a")).state == KILLED  # tests that cannot be collected
        copy = workshop.tree
    assert not copy.exists()
    assert "a + a  # even" in (tree / "derivations" / "code.py").read_text()


def test_options(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "every", lambda: [mutant("a + a", "a * a"), mutant("a / a", "1")])
    assert front.main(["mutants", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "no longer applies: derivations/code.py: a / a -> 1" in printed
    assert "2 mutants: derivations 2" in printed
    assert front.main(["mutants", "--only", "kitchen"]) == 2
    assert "choose of derivations" in capsys.readouterr().err


@pytest.mark.slow
def test_mutants_at_random_positions() -> None:
    files = ["derivations/softmax.py", "hessiankit/engine/storage.py", "hessiankit/curvature/streaming.py"]
    mutants = drawn(command.ROOT, files, 12, seed=1)
    assert [m.key for m in mutants] == [m.key for m in drawn(command.ROOT, reversed(files), 12, seed=1)]
    assert mutants != drawn(command.ROOT, files, 12, seed=2)
    for mutant in mutants:
        changed, before = mutant.applied(command.ROOT), (command.ROOT / mutant.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(before)), mutant
        assert mutant.tests
    assert len({m.file for m in mutants}) == 3
