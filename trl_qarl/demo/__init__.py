"""A model and a task for the quickstart, without a hub."""
