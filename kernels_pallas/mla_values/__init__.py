"""Results of absorbed attention taken out of the latent space, in e4m3 for the output projection."""
