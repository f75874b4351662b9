"""What `python -m benchmarks.bench` measures; scripts of the folder above import it as `bench`."""
