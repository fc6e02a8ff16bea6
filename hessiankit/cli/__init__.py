"""The parsers of the command line, one file a command; none of them imports torch, so that help and completion are quick.

A command is a function ``add_<name>(commands)`` that describes its options and names its runner, ``"module:function"``: the
function that :mod:`hessiankit.cli.main` imports when the command is asked for, and calls with the parsed options.
"""
