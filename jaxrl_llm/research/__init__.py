"""Studies over seeds, analyses of a policy, benchmarks; nothing but the command line imports it."""
