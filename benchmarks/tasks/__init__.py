"""Twelve tasks by hessiankit and by the best peer that does them."""
