"""A run in time and on disk."""
