"""Objectives: TBPO, TRL's losses, and your own."""
