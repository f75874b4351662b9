"""
Calls of the workers of all replicas (`--data-parallel-size`), which return the answers of all. vLLM returns only the
first one's, so an error from any other replica would be lost ([`hear_every_replica`]).
"""

import asyncio
from itertools import chain
from typing import Any

from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError


__all__ = ["call_every_replica", "hear_every_replica"]


def hear_every_replica() -> None:
    """Make the server's client of its engines return the answers of all of them; calling it again changes nothing."""
    # Setting a method that vLLM does not have would have no effect.
    assert "call_utility_async" in vars(DPLBAsyncMPClient)
    DPLBAsyncMPClient.call_utility_async = call_every_replica


async def call_every_replica(client: DPLBAsyncMPClient, method: str, *args: Any) -> Any:
    """
    Call a method of each engine at once.

    Returns:
        Of calls of the workers what each of them answers, replica by replica; of questions whether all say yes; else
        what all say.

    Raises:
        RuntimeError: for the first replica that fails, with its number, or if they do not say the same.
        EngineDeadError: if one is gone.
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
        raise RuntimeError(f"The {len(answers)} replicas do not answer {method!r} alike: {answers}.")
    return answers[0]
