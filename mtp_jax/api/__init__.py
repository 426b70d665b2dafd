"""The Python API: ``LLM``, ``AsyncLLM``, and the modules that turn a prompt into text."""
