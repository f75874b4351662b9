"""Rollouts: engines, weight sync and sampling."""
