"""A grid of runs: what it is, how it is made, what is seen meanwhile."""
