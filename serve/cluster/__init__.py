"""Engines on a Ray cluster: replicas of the server behind a router, and actors that answer batches.

options.py    how many, how large           start.py      the cluster: joined, or started with a token
prefixes.py   which replica gets a prompt   router.py     the same, as Ray Serve asks for it
spec.py       what travels to a process     engine.py     what becomes of it there
gang.py       one engine on several hosts   replicas.py   the deployments
batches.py    the actor for `map_batches`

Only `start`, `router`, `gang` and `replicas` import Ray; it is the extra ``ray``.
"""
