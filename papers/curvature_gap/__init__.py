"""Closing the Curvature Gap: Full Transformer Hessians (Petrov et al.)."""

CHAPTERS = ("setting", "attention", "attention_bounds", "layernorm", "block", "block_bounds", "convergence")
