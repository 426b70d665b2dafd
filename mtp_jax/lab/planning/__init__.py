"""Memory, step time, tokens per second and cost of a deployment, estimated from a config.json alone.

    config -> weights, work -> memory, step_time (a band) -> table -> text, JSON, picture

Nothing here needs jax or a GPU. ``published`` has the figures that estimates are compared with.
"""
