"""Checks of what a user configures."""
