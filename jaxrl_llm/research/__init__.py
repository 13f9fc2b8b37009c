"""Experiments with the package: studies over seeds, analyses of a policy, benchmarks; no run needs them."""
