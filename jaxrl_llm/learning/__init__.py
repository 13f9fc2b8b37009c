"""One training step on the devices: batch, score, credit, update, metrics; and evaluation."""
