"""Closed forms read as formulas, as bounds and in exact arithmetic."""
