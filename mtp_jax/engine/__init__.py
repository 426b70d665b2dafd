"""Requests to steps, on the host. The scheduler, the page allocator and the requests know no jax."""
