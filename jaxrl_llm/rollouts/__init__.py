"""Samplers: where responses come from."""
