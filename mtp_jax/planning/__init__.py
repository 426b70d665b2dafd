"""What a deployment would need and do, from a config.json alone: memory, step time, tokens per second, cost.

    config -> weights, work -> memory, step_time (a band) -> table -> text, JSON, picture

Nothing here needs jax or a GPU. ``published`` has the figures that the estimate is held against.
"""
