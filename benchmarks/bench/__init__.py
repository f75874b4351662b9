"""Measurements of `python -m benchmarks.bench`; scripts of the folder above import it as `bench`."""
