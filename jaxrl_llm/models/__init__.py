"""Qwen2.5 and its relatives: forward pass, log-probs, generation, sharding, Hugging Face files; no RL."""
