"""Profiles of the property tests: few fixed examples by default, many others with HYPOTHESIS_PROFILE=search."""

from __future__ import annotations

import os

try:
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError:  # a development tool
    collect_ignore = ["test_hessian_properties.py", "hessian_points.py"]
else:
    PHASES = [p for p in Phase if p is not Phase.explain]  # which traces every line, and takes minutes at a failure
    COMMON = {
        "phases": PHASES,
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "print_blob": True,
    }
    settings.register_profile("default", settings(derandomize=True, max_examples=6, **COMMON))
    settings.register_profile("search", settings(max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "500")), **COMMON))
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
