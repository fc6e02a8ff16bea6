"""What the callbacks of every trainer share: the base class fetched when it is needed, and the numbers for the trainer's log."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hessiankit.errors import InputError


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
