"""Hyper-connections around a sublayer: streams mixed, their gates made of a product, the sublayer's input."""
