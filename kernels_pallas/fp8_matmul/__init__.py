"""Matrix products with block-scaled FP8 weights, which stay FP8 in memory."""
