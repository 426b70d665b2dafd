"""The work between two products: a residual's sum, RMS normalisation, quantisation to e4m3."""
