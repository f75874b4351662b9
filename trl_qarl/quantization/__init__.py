"""One definition of a low-bit weight, from the table of schemes to the checkpoint. Imports nothing of the other
folders."""
