"""Text to token ids and back, conversations to prompts, grammars to masks of tokens."""
