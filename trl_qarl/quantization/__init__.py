"""Definition of a low-bit weight, from the table of schemes to the checkpoint. Imports no other folder."""
