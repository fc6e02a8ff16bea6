"""The request: a module, its data, a loss and parameters, checked before any work; the module's own loss and gradient."""
