"""The Curse of Depth in Large Language Models (Sun et al. 2025)."""

CHAPTERS = ("definitions", "variance", "jacobian", "scaling", "gradients", "sizes", "tables")
