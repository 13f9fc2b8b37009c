"""Samplers, which answer prompts: the embedded engine and the client of vLLM servers."""
