"""Provenance of numbers."""

from __future__ import annotations

from hessiankit.support import environment


def test_a_version_is_that_of_the_code_it_names() -> None:
    versions = {
        environment.code_version(name) for name in ("hessiankit/__init__.py", "hessiankit/cli/__init__.py", "derivations")
    }
    assert len(versions) == 3
    assert environment.code_version("derivations") in versions
