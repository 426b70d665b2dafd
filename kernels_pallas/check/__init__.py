"""Cases of the kernels, and the tools that lower, verify and time them.

cases/<kernel>.py      ``shapes()`` at which a kernel is checked, compiled, timed; the ``case()`` of each
baselines/<kernel>.py  alternatives on a GPU, to compare times with; else XLA compiles the reference
"""
