"""From a trace to its second derivatives."""
