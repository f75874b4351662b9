"""Muon, states in 8 bits, gradients in 16, and updates that are skipped."""
