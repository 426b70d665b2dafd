"""Engines on a Ray cluster: replicas of the server behind a router, and actors that answer batches.

options.py    how many, how large           start.py      the cluster: joined, or started with a token
prefixes.py   the replica for a prompt     router.py     the same, as Ray Serve asks for it
spec.py       data for a process           engine.py     the engine that it makes there
gang.py       one engine on several hosts   replicas.py   the deployments
batches.py    the actor for `map_batches`

Only `start`, `router`, `gang` and `replicas` import Ray, which the extra ``ray`` installs.
"""
