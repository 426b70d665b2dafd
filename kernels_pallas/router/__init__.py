"""The choice of experts, and their weights."""
