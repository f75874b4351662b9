"""
Classes of vLLM 0.31 that compute another function than transformers', or cannot load a low-bit layer, put right where
they differ, and one that it no longer has. Each module is imported when an engine needs a class of it: what another
release of vLLM has moved breaks the models of one module.
"""

MODELS = {
    "BambaForCausalLM": "granite_hybrid:BambaForCausalLM",
    "BloomForCausalLM": "bloom:BloomForCausalLM",
    "FalconMambaForCausalLM": "mamba1:MambaForCausalLM",
    "GPTNeoXForCausalLM": "bloom:GPTNeoXForCausalLM",
    "Gemma3nForCausalLM": "gemma3n:Gemma3nForCausalLM",
    "Glm4MoeLiteForCausalLM": "glm4_lite:Glm4MoeLiteForCausalLM",
    "GraniteMoeHybridForCausalLM": "granite_hybrid:GraniteMoeHybridForCausalLM",
    "JambaForCausalLM": "mamba1:JambaForCausalLM",
    "LagunaForCausalLM": "laguna:LagunaForCausalLM",
    "Llama4ForCausalLM": "llama4:Llama4ForCausalLM",
    "MambaForCausalLM": "mamba1:MambaForCausalLM",
    "MiniCPM3ForCausalLM": "minicpm3:MiniCPM3ForCausalLM",
    "OlmoHybridForCausalLM": "olmo_hybrid:OlmoHybridForCausalLM",
    # transformers' name, and that of releases.
    "PhimoeForCausalLM": "phimoe:PhimoeForCausalLM",
    "PhiMoEForCausalLM": "phimoe:PhimoeForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "Zamba2ForCausalLM": "zamba2:Zamba2ForCausalLM",
}
"""Module and name of the class that runs an architecture."""
