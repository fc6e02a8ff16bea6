"""Calls of the core that divide parameters into groups, with words for the groups that are read from a model."""
