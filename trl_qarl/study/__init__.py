"""Grids of training runs and the page that compares them."""
