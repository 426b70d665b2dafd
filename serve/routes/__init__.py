"""A module per API: its requests, and how it writes answers."""
