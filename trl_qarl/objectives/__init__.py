"""Objectives: TBPO, and presets of TRL's losses."""
