"""Containers of low-bit codes, one class each."""
