"""Plots of Hessians, block by block."""
