"""What is optimized: TBPO, and presets of TRL's losses."""
