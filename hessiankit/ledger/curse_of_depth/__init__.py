"""The Curse of Depth in Large Language Models (Sun et al. 2025)."""

CHAPTERS = (
    "definitions",
    "block_variance",
    "variance",
    "jacobian",
    "jacobian_bounds",
    "scaling",
    "gradients",
    "methods",
    "tables",
    "figures",
)
