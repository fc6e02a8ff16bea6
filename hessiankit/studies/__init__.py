"""Whole experiments: the classifier of Closing the Curvature Gap, the grid of norm placements, learning rates compared."""
