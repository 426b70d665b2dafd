"""Checked bodies to the engine, and its outputs to one answer or to events."""
