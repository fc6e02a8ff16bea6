"""What every other room uses: errors, checks of arguments, files, tables, progress, the state of torch, compiled kernels."""
