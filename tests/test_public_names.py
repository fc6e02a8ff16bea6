"""What ``import hessiankit`` offers, what it costs, and that no warning, of torch's or ours, reaches a user."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import hessiankit

MADE = {"Transformer", "TransformerBlock", "VisionTransformer", "Monitor", "RecordedRun"}
FUNCTIONS = {name: f for name in hessiankit.__all__ if inspect.isfunction(f := getattr(hessiankit, name))}
CALLED = sorted(MADE | {name for name, f in FUNCTIONS.items() if inspect.signature(f).parameters})
"""Public functions, and the classes that users make objects of."""


@pytest.mark.parametrize("name", hessiankit.__all__)
def test_every_name_is_there_and_documented(name: str):
    assert getattr(hessiankit, name).__doc__
    assert name in dir(hessiankit)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_go_to_other_processes(name: str):
    assert pickle.loads(pickle.dumps(FUNCTIONS[name])) is FUNCTIONS[name]


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(hessiankit.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: str(node.module) for node in block.body for alias in node.names}
    assert seen == hessiankit._HOME
    assert hessiankit.__all__ == sorted(seen)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'hessiankit' has no attribute 'chek'; did you mean 'check'\?$") as told:
        _ = hessiankit.chek
    for name, call in hessiankit.CALLS.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is {re.escape(call)}$"):
            getattr(hessiankit, name)
        assert call.partition("(")[0] in hessiankit.__all__
    assert "".join(traceback.format_exception(told.value)).lower().count("did you mean") == 1  # Python adds none of its own
    assert hessiankit.verify.__name__ == "hessiankit.verify"


def test_dir_shows_public_names_only():
    import hessiankit.verify.testing  # sets an attribute of the package

    assert [name for name in dir(hessiankit) if not name.startswith("__")] == hessiankit.__all__
    assert {"__version__", "__doc__"} <= set(dir(hessiankit))


@pytest.mark.parametrize("name", CALLED)
def test_an_argument_that_is_not_there(name: str):
    called = getattr(hessiankit, name)
    *_, last = (p.name for p in inspect.signature(called).parameters.values() if p.kind is not p.VAR_KEYWORD)
    wrong = last[:-1] + "_x"
    with pytest.raises(
        TypeError, match=rf"{called.__name__}: got an unexpected keyword argument '{wrong}'; did you mean .*'{last}'"
    ):
        called(**{wrong: None})


FRESH = """
import random, sys, hessiankit, hessiankit.cli.pytest_plugin  # which pytest imports wherever hessiankit is installed
assert not {"torch", "sympy", "scipy", "matplotlib"} & set(sys.modules), "import hessiankit alone"
before = random.getstate()
hessiankit.hessian
assert random.getstate() == before, "the first use draws a random number"

import torch

def check(when, packages):
    assert not packages & set(sys.modules), f"{when}: {packages & set(sys.modules)}"

UNUSED = {"sympy", "scipy.sparse", "matplotlib", "pylatexenc", "curvlinops", "transformers"}
UNUSED |= {"derivations.matrix", "derivations.operation"}  # one of which every chapter in vec_r imports
check("import", UNUSED)
x = torch.randn(2, 3, 4)
for activation in ("relu", "gelu", "swiglu"):
    hessiankit.hessian(hessiankit.TransformerBlock(4, 5, activation=activation), x, x)
    check(activation, UNUSED)
module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 4))
print(hessiankit.hessian(module, x, x))
check("a module", UNUSED)
for name in hessiankit.__all__:
    getattr(hessiankit, name)
import hessiankit.cli.main
check("every public name", {"transformers", "lightning", "timm", "sklearn", "curvlinops", "papers"})

sys.path.insert(0, sys.argv[1])
from public_calls import CALLS, FOLDER

for call in CALLS.values():
    result = call.function(**call.right())
    str(result)
    if hasattr(result, "plot"):
        result.plot()
FOLDER.cleanup()
"""


def test_a_new_process_imports_what_it_uses_draws_no_number_and_is_silent():
    """``import hessiankit`` imports no torch, a first Hessian only the packages that it uses, and no public call warns.

    Under ``python -W error``, where torch loads its forward mode, as it does once a process, and pytest's filters are not there.
    """
    command = [sys.executable, "-W", "error", "-c", FRESH, str(Path(__file__).parent / "robustness")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_verify_offers_what_measures_besides() -> None:
    from hessiankit import verify

    assert (verify.bounds, verify.sharpness, verify.check) == (hessiankit.bounds, hessiankit.sharpness, hessiankit.check)
    with pytest.raises(AttributeError, match=r"module .hessiankit\.verify. has no attribute .bound."):
        verify.bound  # noqa: B018
