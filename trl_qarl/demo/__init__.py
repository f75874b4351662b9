"""A model for the quickstart, without a hub."""
