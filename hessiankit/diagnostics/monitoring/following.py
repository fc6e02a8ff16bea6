"""What the callbacks of every trainer share: a class made when it is asked for, and the numbers for the trainer's log."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from hessiankit.support.errors import InputError


def class_of(package: str, name: str, extra: str = "training") -> type:
    """Return a class of an optional package.

    Raises:
        InputError: The package is missing, or cannot be imported.

    >>> class_of("collections", "Counter").__name__
    'Counter'
    """
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a compiled half that does not fit the installed torch
        raise InputError(
            f"SharpnessCallback: needs the package {package} ({error}); install it with pip install 'hessiankit[{extra}]'"
        ) from error
    if not isinstance(found, type):
        raise InputError(
            f"SharpnessCallback: {package}.{name} is no class; install the version that 'hessiankit[{extra}]' asks for"
        )
    return found


def on_first_use(module: dict[str, Any], events: type, package: str, base: str) -> Callable[[str], type]:
    """Return a module's ``__getattr__`` that makes its ``SharpnessCallback`` on first use.

    So the module can be read where the trainer's package is not installed, and importing it does not import the package.

    Args:
        module: Its ``globals()``.
        events: What the callback does, without a base class.
        package: The trainer's.
        base: The class of the package that its callbacks are made of.

    Raises:
        InputError: By what is returned, if the package is not installed.

    >>> class Events:
    ...     "Counts."
    >>> made = on_first_use({"__name__": "here"}, Events, "collections", "Counter")("SharpnessCallback")
    >>> made, made(a=2), made.__doc__
    (<class 'here.SharpnessCallback'>, SharpnessCallback({'a': 2}), 'Counts.')
    """

    def attribute(name: str) -> type:
        where = module["__name__"]
        if name != "SharpnessCallback":
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        made = type(name, (events, class_of(package, base)), {"__doc__": events.__doc__, "__module__": where})
        module[name] = made
        return made

    return attribute


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a measurement that a trainer's log can hold, by a name with slashes.

    >>> record = {"step": 3, "loss": 2.0, "sharpness": {"types": {"Norm": {"value": 0.5, "low": 0.4}}}}
    >>> scalars(record)
    {'monitor/loss': 2.0, 'sharpness/Norm': 0.5}
    """
    found = {"monitor/loss": record["loss"]} if "loss" in record else {}
    found |= {f"sharpness/{name}": one["value"] for name, one in record.get("sharpness", {}).get("types", {}).items()}
    found |= {f"norm/{name}": value for name, value in record.get("norms", {}).get("types", {}).items()}
    if "eigenvalue" in record:
        found["top_eigenvalue"] = record["eigenvalue"]["value"]
    return {name: float(value) for name, value in found.items()}
