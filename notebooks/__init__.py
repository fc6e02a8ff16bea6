"""Notebooks, each a script in jupytext's percent format and the notebook that is made of it: ``python -m notebooks``.

The script is the source. The notebook beside it holds the same cells with what they gave, and is written by
``python -m notebooks --write``, never by hand.
"""
