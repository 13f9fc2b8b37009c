"""Rollouts from vLLM servers: requests, weights and their proof, and servers as child processes."""
