"""Bodies of requests: a class checks each body, and ``reading.py`` makes it of the request's bytes."""
