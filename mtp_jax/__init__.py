"""DeepSeek-V3-family inference in JAX, the model's own NextN layer drafting."""
