"""A module's computation as a list of primitive applications."""
