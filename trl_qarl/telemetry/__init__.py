"""Measurements of a run, and the files they are written to."""
