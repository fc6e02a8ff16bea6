"""Our own statements that belong to no single paper; those about one paper are in that paper's package."""

CHAPTERS: tuple[str, ...] = ()
