"""Mutation testing: small errors put into the code one at a time, and whether the tests, or ``check`` alone, see them."""
