"""A load replayed in virtual time: the engine's own scheduler and depth control, on predicted launches.

    file -> load -> replay: Engine on simulate.Counted, timed by planning.LaunchTimes -> text, JSON, picture

Nothing here needs jax, weights or a GPU.
"""
