"""Routed experts: their choice, their products, and the exchange of rows with experts of other devices."""
