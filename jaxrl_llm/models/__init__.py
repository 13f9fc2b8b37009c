"""Qwen2.5 in Flax NNX, its log-probs, its checkpoints and its place on a mesh; no RL."""
