"""The audit of torch's routes to second derivatives: operations, routes, the table of results, its command."""
