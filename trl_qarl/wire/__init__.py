"""The protocol between trainer and vLLM."""
