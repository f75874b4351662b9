"""The policy on disk and on the Hub."""
