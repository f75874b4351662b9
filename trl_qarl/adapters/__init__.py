"""LoRA on a low-bit base: PEFT's adapters in high precision over frozen codes."""
