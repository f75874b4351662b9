"""The learner's forward in the engine's own arithmetic: both give a token the same log-prob, bit for bit."""
