"""Log-probs that an engine gives to tokens it is shown."""

__all__ = ["engine_log_probs", "log_probs_of_tokens", "prompt_log_probs"]


def prompt_log_probs(generation, sequences: list[list[int]], num_top: int = 0) -> list[list[dict[int, float]]]:
    """
    Return what the engine expects at each position of `sequences` from the second token on: `{token id: log-prob}` of
    the token that stands there and of the `num_top` likeliest ones, at temperature 1.
    """
    if generation.mode != "server":
        return engine_log_probs(generation.llm, sequences, num_top)
    client = generation.vllm_client
    body = {"model": client.model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": num_top}
    choices = client._post(f"{client.base_url}/v1/completions", json=body)["choices"]
    return [
        [{int(token): value["logprob"] for token, value in entry.items()} for entry in choice["prompt_logprobs"][1:]]
        for choice in choices
    ]


def engine_log_probs(
    llm, sequences: list[list[int]], num_top: int = 0, lora_request=None
) -> list[list[dict[int, float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
    prompts = [{"prompt_token_ids": ids} for ids in sequences]
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=lora_request)
    return [
        [{token: value.logprob for token, value in entry.items()} for entry in output.prompt_logprobs[1:]]
        for output in outputs
    ]


def log_probs_of_tokens(scores: list[list[dict[int, float]]], sequences: list[list[int]]) -> list[list[float]]:
    return [
        [entry[token] for entry, token in zip(row, ids[1:], strict=True)]
        for row, ids in zip(scores, sequences, strict=True)
    ]
