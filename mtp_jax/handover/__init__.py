"""Prefill apart from decode: pages of prompts that go from one server to another."""
