"""Bodies of requests: a class checks each body, and ``reading.py`` parses the request's bytes into it."""
