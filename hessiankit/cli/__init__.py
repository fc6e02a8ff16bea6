"""Parsers of the command line, one file a command; no parser imports torch, so that help and completion are quick.

A command is a function ``add_<name>(commands)`` that describes its options, and a function ``run_<name>(args)`` that
:mod:`hessiankit.cli.main` calls with the parsed options.
"""
