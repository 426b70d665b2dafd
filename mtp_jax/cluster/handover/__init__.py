"""Hand-over, for prefill apart from decode: pages of prompts go from one server to another."""
