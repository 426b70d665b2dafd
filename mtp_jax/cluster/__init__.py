"""Servers that work together: engines on Ray, and prefill apart from decode. A server runs without it."""
