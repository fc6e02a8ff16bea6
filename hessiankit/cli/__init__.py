"""The command line, one file a command; no file imports torch before its command runs, so that help and errors are quick.

Each file has an ``app`` made by :func:`hessiankit.cli.program.command`, and a function whose signature and docstring are the
options and their help.
"""
