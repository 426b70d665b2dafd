"""A device without a model behind the runner of any other: for requests, pages, text and HTTP.

A request's prompt and options alone determine its text and the number of drafts that each step keeps.
``tests/simulate`` compares both with the language over random histories of launches, and plants bugs.
"""
