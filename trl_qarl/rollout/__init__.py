"""Where completions come from, and what the sampler says about them."""
