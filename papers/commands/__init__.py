"""Commands of ``python -m papers`` besides those of the ledger, one file a command, each as :mod:`hessiankit.cli` describes."""
