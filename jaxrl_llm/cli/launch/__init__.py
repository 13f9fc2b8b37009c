"""Files that start a run on machines elsewhere, filled in."""
