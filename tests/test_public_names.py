"""What ``import hessiankit`` offers, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback

import pytest

import hessiankit

MADE = {"Transformer", "TransformerBlock", "VisionTransformer", "Monitor"}
CALLED = sorted(MADE | {name for name in hessiankit.__all__ if inspect.isfunction(getattr(hessiankit, name))})
"""Public functions, and the classes that users make objects of."""


@pytest.mark.parametrize("name", hessiankit._FORMER)
def test_a_former_name_warns_and_works(name: str):
    with pytest.warns(DeprecationWarning, match=f"hessiankit.{name} is now "):
        assert getattr(hessiankit, name).__doc__
    assert name not in dir(hessiankit)


@pytest.mark.parametrize("name", hessiankit.__all__)
def test_every_name_is_there_and_documented(name: str):
    assert getattr(hessiankit, name).__doc__
    assert name in dir(hessiankit)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'hessiankit' has no attribute 'chek'; did you mean 'check'\?$") as told:
        _ = hessiankit.chek
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


def test_the_import_is_light():
    code = "import sys, hessiankit; assert not {'torch', 'sympy', 'scipy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_first_hessian_imports_no_package_that_it_does_not_use():
    code = """
import sys
import torch
import hessiankit

def check(when):
    found = {"sympy", "scipy.sparse", "matplotlib", "curvlinops", "transformers"} & set(sys.modules)
    assert not found, f"{when}: {found}"

check("import")
x = torch.randn(2, 3, 4)
for activation in ("relu", "gelu", "swiglu"):
    hessiankit.hessian(hessiankit.TransformerBlock(4, 5, activation=activation), x, x)
    check(activation)
module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 4))
print(hessiankit.hessian(module, x, x))
check("a module")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_use_draws_no_random_number():
    code = "import random, hessiankit; before = random.getstate(); hessiankit.hessian; assert random.getstate() == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_optional_packages_are_imported_when_used():
    code = (
        "import sys, hessiankit; [getattr(hessiankit, n) for n in hessiankit.__all__]; import hessiankit.cli.main; "
        "found = {'transformers', 'lightning', 'timm', 'sklearn', 'curvlinops'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
