"""Simulated devices without a model, behind the same ``Runner`` as a real one.

Tests of requests, pages, text and HTTP run on ``Simulated``, which has text; loads in virtual time run on
``Counted``, which only counts.

On ``Simulated`` a request's prompt and options alone determine its text and the number of drafts that each
step keeps. ``tests/simulate`` compares both with the language over random histories of launches, and plants
bugs.
"""
