"""Requests to steps, on the host. Only ``engine.py`` touches jax; the page allocator and the requests do not."""
