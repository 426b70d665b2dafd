"""The laboratory: benchmarks, planning, profiling, training, and their commands. Engines run without it."""
