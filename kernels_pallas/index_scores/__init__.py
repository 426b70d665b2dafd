"""Scores of DeepSeek's lightning indexer over paged index keys."""
