"""The textbook: closed forms of a transformer's derivatives in row-wise vectorisation, and nothing else."""
