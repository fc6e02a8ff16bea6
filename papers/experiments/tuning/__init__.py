"""Learning rates compared at equal budget: the baseline is tuned first, every difference has an interval."""
