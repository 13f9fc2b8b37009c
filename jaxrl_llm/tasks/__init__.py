"""Prompts and verifiable rewards, in plain Python."""
