"""The multi-token-prediction training objective and the recipe that made the demo model."""
