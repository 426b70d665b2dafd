"""Heads that draft a block in one pass: DFlash, DFlash2 and DSpark."""
