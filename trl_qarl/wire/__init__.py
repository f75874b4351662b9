"""What the trainer's side and vLLM's side agree on."""
