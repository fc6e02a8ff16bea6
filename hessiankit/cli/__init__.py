"""The command line, one file a command; no file imports torch before its command runs, so that help and completion are quick.

The first line of a command's file is its line in the list of commands, the paragraph below is the description in its help.
``EXAMPLES`` are commands as they are typed, each with what it does; ``FAILS`` says when the exit code is 1, where that happens.
``options(command)`` adds the options to the parser, and ``run(args)`` runs the command and returns an exit code, or None for 0.
"""
