"""Is a transformer's Hessian block-diagonal? Exact measurements on small models, and what three papers say."""

CHAPTERS = ("claims",)
"""Modules with rows, in reading order."""
