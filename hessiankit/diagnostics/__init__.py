"""Measurements of a model: sharpness by block type, depth, both along training, and on several ranks."""
