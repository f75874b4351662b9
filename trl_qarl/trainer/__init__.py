"""The trainer: its configuration, policy, scoring and checkpoints."""
