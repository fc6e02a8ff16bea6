"""Statements that no paper makes, beyond those that stand beside a paper's own in its package."""

CHAPTERS: tuple[str, ...] = ()
