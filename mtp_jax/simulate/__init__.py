"""A device without a model behind the runner of any other: for requests, pages, text and HTTP."""
