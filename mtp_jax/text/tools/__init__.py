"""Calls of tools in a model's text: the parts of an output, and how families of models write them."""
