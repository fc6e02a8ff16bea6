"""Base utilities: errors, checks of arguments, files, tables, progress, state of torch, compiled kernels."""
