"""Closed forms of a block's derivatives as formulas: ``derive`` and its result."""
