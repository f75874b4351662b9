"""Naive float64 implementations to test against. Nothing in here imports the package under test."""
