"""Environments and tasks of other packages, each an extra of its own."""
