"""Containers of low-bit codes, one class and one file each; a file's name is the container's, with underscores."""
