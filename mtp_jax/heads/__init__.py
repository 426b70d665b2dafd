"""Draft heads: a folder for each kind, which declares it without jax and has its drafter.

``kinds`` lists them, ``build`` makes a model's drafter.
"""
