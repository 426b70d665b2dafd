"""Products of rows with weights and the norms before them: plain, for a CPU, for a Hopper GPU."""
