"""Closed forms in exact arithmetic: residues, jets, and the cases compared on them."""
