"""What is measured about a run, and the files it is written to."""
