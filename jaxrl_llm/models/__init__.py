"""Qwen2.5: forward pass, log-probs, generation, sharding, Hugging Face files; no RL."""
