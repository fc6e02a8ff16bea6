"""What is asked for: a module, its data, a loss and parameters, checked before any work."""
