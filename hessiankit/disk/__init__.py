"""Matrices larger than memory: planned, forecast, written panel by panel, resumed."""
