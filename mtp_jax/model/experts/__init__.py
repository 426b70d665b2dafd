"""Routed experts: their choice, their products, and the way of rows to experts of other devices."""
