"""Formats of low-bit weights, one class for each container."""
