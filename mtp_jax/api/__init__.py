"""What a program calls: ``LLM``, ``AsyncLLM``, and what becomes of a prompt on its way to text."""
