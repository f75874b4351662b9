"""
Calls of the workers of all replicas (`--data-parallel-size`) that return all answers. vLLM returns only the first
replica's, so an error from any other replica would be lost.
"""

import asyncio
from itertools import chain
from typing import Any

from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError


__all__ = ["call_every_replica", "hear_every_replica"]


def hear_every_replica() -> None:
    """Have the server's client of its engines return all answers; calling it again changes nothing."""
    # Overriding a method that vLLM has renamed would have no effect.
    assert "call_utility_async" in vars(DPLBAsyncMPClient)
    DPLBAsyncMPClient.call_utility_async = call_every_replica


async def call_every_replica(client: DPLBAsyncMPClient, method: str, *args: Any) -> Any:
    """
    Call a method of all engines concurrently.

    Returns:
        The answers of all workers, replica by replica, for calls of workers; `True` if all answers are, for answers of
        type `bool`; else the common answer.

    Raises:
        RuntimeError: for the first replica that fails, with its number, or if answers differ.
        EngineDeadError: if an engine is dead.
    """
    engines = client.core_engines

    async def call(number: int) -> Any:
        try:
            return await client._call_utility_async(method, *args, engine=engines[number])
        except EngineDeadError:
            raise
        except Exception as error:
            raise RuntimeError(f"Replica {number} of {len(engines)}: {error}") from error

    answers = await asyncio.gather(*map(call, range(len(engines))))
    if method == "collective_rpc":
        return list(chain.from_iterable(answers))
    if all(isinstance(answer, bool) for answer in answers):
        return all(answers)
    if any(answer != answers[0] for answer in answers):
        raise RuntimeError(f"The {len(answers)} replicas answer {method!r} differently: {answers}.")
    return answers[0]
