"""Tasks: examples, prompts and verifiable rewards, in plain Python."""
