"""A run over time and on disk: the loop, checkpoints, the run folder, the journal, stopping."""
