"""vLLM and the learner's own modules as engines: starting, requests, answers."""
