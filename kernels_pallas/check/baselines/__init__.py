"""Alternatives to a kernel on a GPU, to compare times with."""
