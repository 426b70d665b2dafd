"""The Python API: ``LLM``, ``AsyncLLM``, and the way of a prompt to text."""
