"""HybridNorm (Zhuo et al. 2025)."""

CHAPTERS = (
    "equations",
    "first_block",
    "calculus",
    "lemmas",
    "facts",
    "theorem_pre",
    "theorem_qkv",
    "theorem_qkv_readings",
    "coupling",
    "gauges",
    "positions",
    "redundancy",
    "tables",
    "settings",
    "figures",
    "curvature",
)
