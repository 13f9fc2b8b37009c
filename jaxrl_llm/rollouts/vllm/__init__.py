"""Rollouts from vLLM servers: requests, weight sync with proof, servers as child processes."""
