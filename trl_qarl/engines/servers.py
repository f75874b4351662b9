"""Several servers of one trainer as one engine."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..wire.protocol import PublishError
from .background import BackgroundCall
from .engine import Tensors
from .http_session import ServerLost
from .server import ServerEngine, differing_settings


REJOIN_SECONDS = 2.0
"""Wait for lost servers at a weight sync. One that runs answers in milliseconds, and one whose process has ended
refuses at once; only a host that has vanished costs this time."""

logger = logging.getLogger(__name__)


class Servers:
    """
    The [`~trl_qarl.engines.engine.Engine`] of several servers, which are started alike.

    Each gets every weight sync, and a share of the prompts: all completions of a prompt come from one server. A server
    that does not answer is left out with a warning, and the others draw its share. It takes part again from the first
    weight sync that it answers ([`~Servers.rejoin`]). [`ServerLost`] is raised when none is left. A server that
    refuses weights is not left out: its error is raised.
    """

    in_every_process = False

    def __init__(self, engines: Sequence[ServerEngine]):
        self.engines = list(engines)
        self.works_meanwhile = all(engine.works_meanwhile for engine in engines)
        # For each server that was left out, the attempts to reach it, and the last error.
        self._lost: dict[ServerEngine, BackgroundCall] = {}
        self._reasons: dict[ServerEngine, Exception] = {}
        self._described: dict[str, Any] = {}

    @property
    def present(self) -> list[ServerEngine]:
        """The servers that are not left out."""
        return [engine for engine in self.engines if engine not in self._lost]

    def describe(self) -> dict[str, Any]:
        described = self._each(lambda engine: engine.describe())
        self._described, *_ = described.values()
        for engine, theirs in described.items():
            self._check_alike(engine, theirs)
        return {**self._described, "replicas": sum(theirs["replicas"] for theirs in described.values())}

    def begin(self) -> list[str]:
        return sorted({name for names in self._each(lambda engine: engine.begin()).values() for name in names})

    def send(self, tensors: Tensors) -> None:
        # NCCL sends from the current stream of the caller's thread.
        self._each(lambda engine: engine.send(tensors), in_threads=self.works_meanwhile)

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self._each(lambda engine: engine.finish(fingerprints, weight_version))

    def weight_version(self) -> str:
        # Not in `_each`: completions of a server that is lost by now cannot be trusted.
        return ", ".join(sorted({engine.weight_version() for engine in self.present}))

    def generate(
        self, prompts: list[list[int]], pictures: Sequence[Any] | None = None, n: int = 1, **sampling
    ) -> dict[str, Any]:
        drawn: list[dict[str, Any]] = [{}] * len(prompts)
        left = list(range(len(prompts)))
        while left:
            present = self.present
            shares = {engine: left[place :: len(present)] for place, engine in enumerate(present)}

            def draw(engine: ServerEngine, shares=shares) -> list[dict[str, Any]]:
                share = shares[engine]
                given = [prompts[i] for i in share], pictures and [pictures[i] for i in share]
                return _by_prompt(engine.generate(*given, n=n, **sampling), len(share), n)

            for engine, rows in self._each(draw, [engine for engine in present if shares[engine]]).items():
                for i, row in zip(shares[engine], rows, strict=True):
                    drawn[i] = row
            left = [i for i in left if not drawn[i]]
        return {
            name: None if values is None else [value for row in drawn for value in row[name]]
            for name, values in drawn[0].items()
        }

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        scores = self._each(lambda engine: engine.score(token_ids, pictures))
        return [value for values in scores.values() for value in values]

    def clear_cache(self) -> None:
        self._each(lambda engine: engine.clear_cache())

    def close_session(self) -> None:
        """Call [`~trl_qarl.engines.client.QaRLClient.close_session`] for each server."""
        for engine in self.engines:
            engine.close_session()

    def reconnect(self, timeout: float) -> bool:
        """Connect to each server again. Return whether one of them is a new process, or raise [`ServerLost`] if none
        answers within `timeout` seconds."""
        instances = {engine: engine.client.instance for engine in self.engines}
        self._lost = {engine: BackgroundCall() for engine in self.engines}
        if not self.rejoin(timeout):
            raise self._none_left()
        return any(engine.client.instance != instances[engine] for engine in self.present)

    def rejoin(self, timeout: float = 0.0) -> bool:
        """Take in lost servers that answer and are started like the others; with `timeout` wait that many seconds for
        the first one. Return whether there are any: they need all weights."""
        for engine, attempt in self._lost.items():
            if not attempt.is_running:
                attempt.start(partial(engine.client.reconnect, timeout))
        while True:
            deadline = time.monotonic() + REJOIN_SECONDS
            for attempt in self._lost.values():
                attempt.wait(max(0.0, deadline - time.monotonic()))
            back = [
                engine for engine, attempt in self._lost.items() if not attempt.is_running and self._is_back(engine)
            ]
            for engine in back:
                del self._lost[engine]
            if back or not (timeout and any(attempt.is_running for attempt in self._lost.values())):
                return bool(back)

    def _is_back(self, engine: ServerEngine) -> bool:
        """Connect the channel of a server whose session was opened again, and compare its settings."""
        try:
            self._lost[engine].answer()
            engine.channel.connect()
            self._check_alike(engine, engine.describe())
        except (ServerLost, PublishError, ValueError) as error:
            engine.close_session()
            self._reasons[engine] = error
            if isinstance(error, ValueError):
                logger.warning("The restarted server stays left out. %s", error)
            return False
        logger.warning("The vLLM server at %s takes part again.", engine.client.base_url)
        return True

    def _each(
        self,
        function: Callable[[ServerEngine], Any],
        engines: Iterable[ServerEngine] | None = None,
        in_threads: bool = True,
    ) -> dict[ServerEngine, Any]:
        """Return the results of the servers that answer; the others are lost. Any other error is raised once all calls
        have ended."""
        calls = {engine: BackgroundCall(in_threads) for engine in (self.present if engines is None else engines)}
        for engine, call in calls.items():
            call.start(partial(function, engine))
        results, refusals = {}, []
        for engine, call in calls.items():
            try:
                results[engine] = call.answer()
            except ServerLost as error:
                self._lose(engine, error)
            except PublishError as error:
                refusals.append(PublishError(f"The server at {engine.client.base_url}: {error}"))
            except Exception as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]
        if not self.present:
            raise self._none_left()
        return results

    def _check_alike(self, engine: ServerEngine, theirs: dict[str, Any]) -> None:
        # Each may have replicas, and the channel that suits its host.
        if names := set(differing_settings(self._described, theirs)) - {"replicas", "backend"}:
            raise ValueError(
                f"The server at {engine.client.base_url} differs from the first one in: {', '.join(sorted(names))}. Start all servers "
                "of a trainer with the same model and options."
            )

    def _lose(self, engine: ServerEngine, error: ServerLost) -> None:
        engine.close_session()
        self._lost[engine], self._reasons[engine] = BackgroundCall(), error
        logger.warning(
            "The vLLM server at %s is left out until it answers at a weight sync; %d of %d servers are left. %s",
            *(engine.client.base_url, len(self.present), len(self.engines), error),
        )

    def _none_left(self) -> ServerLost:
        reasons = "".join(f"\n  {error}" for error in self._reasons.values())
        return ServerLost(f"None of the {len(self.engines)} vLLM servers is left:{reasons}")


def _by_prompt(answer: dict[str, Any], num_prompts: int, n: int) -> list[dict[str, Any]]:
    """Return the rows of an answer that belong to each prompt: `n` of everything but the prompt itself. `ValueError`
    is raised for another number of rows."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_prompts)]
    for name, values in answer.items():
        size = 1 if name == "prompt_ids" else n
        if values is not None and len(values) != size * num_prompts:
            raise ValueError(f"{len(values)} `{name}` in place of {size * num_prompts}")
        for i, row in enumerate(rows):
            row[name] = None if values is None else values[i * size : (i + 1) * size]
    return rows
