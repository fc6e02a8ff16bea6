"""HybridNorm (Zhuo et al. 2025)."""

CHAPTERS = ("placements", "jacobians", "theorem_pre", "theorem_qkv", "tables", "figures")
