"""
Ways of tensors to an engine.

| transport | between | how |
|---|---|---|
| [`FileTransport`] | trainer and server on one host, or hosts with a shared filesystem | safetensors files in one directory |
| [`~trl_qarl.rollout.http_transport.HTTPTransport`] | trainer and server anywhere | pieces of safetensors files |
| [`NCCLTransport`] | GPUs of trainer and server | vLLM's NCCL weight transfer, through TRL's client |
| [`DirectTransport`] | trainer and engine in one process | the tensors themselves |
"""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..wire.protocol import PublishError
from ..wire.transfer_dir import check_transfer_dir, make_transfer_dir, owned_prefix, remove_leftovers
from .pictures import PICTURE_PATH, picture_request, sent_ids


__all__ = [
    "DirectTransport",
    "FileTransport",
    "NCCLTransport",
    "ServerTransport",
    "Tensors",
    "Transport",
    "num_bytes_of",
]

logger = logging.getLogger(__name__)

Tensors = list[tuple[str, torch.Tensor]]


class Transport(Protocol):
    """Channel to an engine: sends tensors, begins and finishes a weight sync, and scores with the engine."""

    def describe(self) -> dict[str, Any]:
        """
        Return what the engine was built for: `quantization_config`, `dtype`, `logprobs_mode`, kernels; for a server
        also how many `replicas` it has, which are all alike.
        """

    def begin(self) -> list[str]:
        """
        Start an update. The engine does not generate from here on. Returns the names of tensors that the engine no
        longer holds as they were published.
        """

    def keep_copy(self) -> str:
        """
        Have the engine keep a copy of what it is sent, to which changes can be applied. Returns the digest of the
        fingerprints of what it holds already; the empty string where that is nothing, or not the same on each rank.
        """

    def send(self, tensors: Tensors) -> None:
        """Deliver a chunk."""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        """End the update and raise [`PublishError`] unless the engine holds what the fingerprints say."""

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        """
        The engine's log-probs of the tokens from the second on, NaN where there is none; replica by replica. With
        `pictures` the tokens are an [`~trl_qarl.rollout.pictures.ExpandedPrompt`]. Raises [`PublishError`] if the
        engine makes another prompt of it.
        """

    def clear_cache(self) -> None:
        """Set all keys and values that the engine holds to 0."""


class DirectTransport:
    """
    Hands tensors to an engine in this process.

    Args:
        llm (`vllm.LLM`):
            Engine whose worker runs in this process (`distributed_executor_backend` `"uni"` or `"external_launcher"`).
    """

    def __init__(self, llm):
        self.llm = llm
        worker = llm.llm_engine.model_executor.driver_worker
        self._worker = getattr(worker, "worker", worker)

    def describe(self) -> dict[str, Any]:
        return self._worker.qarl_describe()

    def begin(self) -> list[str]:
        self._abort_requests()
        try:
            changed = self._worker.qarl_begin()
        except RuntimeError as error:
            raise PublishError(str(error)) from error
        self._worker.start_weight_update()
        return changed

    def keep_copy(self) -> str:
        return self._worker.qarl_keep_copy()

    def _abort_requests(self) -> None:
        """Abort requests of an interrupted rollout, whose completions would be returned with the next ones."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if not self.llm.reset_prefix_cache():
            raise PublishError(
                "vLLM could not empty its prefix cache, which holds keys and values of the old weights: a rollout was interrupted "
                "in the middle of a step. Build the engine again."
            )
        # Embeddings of images, computed with the old weights.
        self.llm.reset_mm_cache()
        engine.reset_encoder_cache()

    def send(self, tensors: Tensors) -> None:
        from vllm.config import set_current_vllm_config

        engine = self._worker.weight_transfer_engine
        with set_current_vllm_config(self._worker.vllm_config):
            try:
                engine.load((name, tensor.to(engine.device)) for name, tensor in tensors)
            except Exception as error:
                # vLLM's loaders raise whatever comes of a name or shape they do not expect.
                raise PublishError(
                    f"The engine could not load {tensors[0][0]} to {tensors[-1][0]}: {type(error).__name__}: {error}"
                ) from error

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self._worker.qarl_expect(fingerprints)
        try:
            self._worker.finish_weight_update()
        except RuntimeError as error:
            raise PublishError(str(error)) from error
        self.llm.update_weight_version(weight_version)

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        from vllm import SamplingParams

        if self.llm.llm_engine.is_sleeping():
            # The weights are awake; what follows a publication is a rollout, which needs the cache too.
            self.llm.wake_up(tags=["kv_cache"])
        # Greedy: a sample would move the random state of the rollout.
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        prompt: dict[str, Any] = {"prompt_token_ids": sent_ids(token_ids)}
        if pictures:
            prompt["multi_modal_data"] = {"image": list(pictures)}
        (output,) = self.llm.generate([prompt], parameters, use_tqdm=False)
        _check_prompt(output.prompt_token_ids, token_ids)
        return [
            entry[token].logprob if entry else math.nan
            for entry, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]

    def clear_cache(self) -> None:
        # Sleep mode has discarded the cache and freed its memory.
        if not self.llm.llm_engine.is_sleeping():
            self._worker.qarl_clear_cache()


class ServerTransport:
    """
    Requests common to every transport to a server; `client` is a [`~trl_qarl.rollout.client.QaRLClient`]. `is_drawing`
    tells whether completions of this trainer are in flight that are to go on with what is published.
    """

    def __init__(self, client):
        self.client = client
        self.is_drawing: Callable[[], bool] = lambda: False
        self._replicas = 1

    def describe(self) -> dict[str, Any]:
        first, *others = self.client.call_workers("qarl_describe")
        for other in others:
            # The ranks of one replica are compared by their fingerprints instead.
            if (replica := other.get("replica")) != first.get("replica") and (names := _differing(first, other)):
                raise ValueError(
                    f"Replica {replica} of the server is not like the first one. They differ in: {', '.join(names)}."
                )
        self._replicas = len({worker.get("replica") for worker in (first, *others)})
        return {**first, "replicas": self._replicas}

    def begin(self) -> list[str]:
        # Abort other clients' requests: they must not finish with other weights than they began with. Of kept ones
        # vLLM drops keys and values, and computes them again with the new weights.
        self.client.control(f"/pause?mode={'keep' if self.is_drawing() else 'abort'}")
        # Union of the names that each rank has lost.
        changed = {name for names in self.client.call_workers("qarl_begin") for name in names or []}
        self.client.control("/start_weight_update")
        return sorted(changed)

    def keep_copy(self) -> str:
        held = set(self.client.call_workers("qarl_keep_copy"))
        return held.pop() if len(held) == 1 else ""

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self.client.call_workers("qarl_expect", fingerprints=fingerprints)
        # Empty the cache before the gate opens.
        reset = self.client.control("/reset_prefix_cache")
        if reset.content and not _json(reset).get("success", True):
            raise PublishError(
                "/reset_prefix_cache: the server could not empty its prefix cache, which holds keys and values of the old weights."
            )
        self.client.control("/finish_weight_update", {"weight_version": weight_version})
        self.client.control("/resume")
        stamped = self.client.weight_version()
        if stamped != weight_version:
            raise PublishError(f"Published weight version {weight_version!r}, but the server says {stamped!r}.")

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        path, body = "/v1/completions", {"model": self.client.model, "prompt": token_ids, **sampling}
        if pictures:
            path, body = PICTURE_PATH, picture_request(self.client.model, token_ids, pictures, **sampling)
        return [
            value for replica in range(self._replicas) for value in self._score_with(replica, path, body, token_ids)
        ]

    def _score_with(self, replica: int, path: str, body: dict[str, Any], token_ids: list[int]) -> list[float]:
        answer = _json(self.client.control(path, body, {"X-data-parallel-rank": str(replica)}))
        if path == PICTURE_PATH:
            _check_prompt(answer.get("prompt_token_ids"), token_ids)
        entries = (answer if path == PICTURE_PATH else answer["choices"][0]).get("prompt_logprobs")
        if not entries or len(entries) != len(token_ids):
            raise PublishError(f"{path}: the server returned no log-probs of the prompt.")
        values = [(entry or {}).get(str(token), {}) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]
        return [math.nan if value.get("logprob") is None else value["logprob"] for value in values]

    def clear_cache(self) -> None:
        self.client.call_workers("qarl_clear_cache")


class FileTransport(ServerTransport):
    """Writes each chunk to the server's transfer directory, which must be the same directory on both hosts."""

    _known_dir: str | None = None
    """A directory that has been seen on this host."""

    def begin(self) -> list[str]:
        directory = self.client.transfer_dir
        if directory and directory == self._known_dir and not os.path.lexists(directory):
            # Cleaners of temporary directories remove folders that look unused.
            self._make_again(directory)
        if not directory or not os.access(directory, os.W_OK | os.X_OK):
            raise PublishError(
                f"The server takes weights from {directory!r}, which this host cannot write to. Start the server with "
                "`trl-qarl vllm-serve --transfer_dir DIR`, where DIR is a directory both hosts share."
            )
        check_transfer_dir(directory)
        self._known_dir = directory
        # Remove files of killed trainers only: another server may use the same directory.
        remove_leftovers(directory, also=self.client.instance)
        return super().begin()

    def _make_again(self, directory: str) -> None:
        logger.warning("Something has removed the transfer directory %s; it is made again.", directory)
        try:
            make_transfer_dir(directory)
        except (OSError, ValueError) as error:
            raise PublishError(
                f"The transfer directory {directory!r} was removed and cannot be created again: {error}"
            ) from error

    def send(self, tensors: Tensors) -> None:
        directory = self.client.transfer_dir
        try:
            path = self._write(tensors, directory)
        except (OSError, SafetensorError) as error:
            raise PublishError(_cannot_write(directory, num_bytes_of(tensors), error)) from error
        try:
            self.client.control("/update_weights", {"update_info": {"file": path.name}})
        finally:
            path.unlink(missing_ok=True)

    def _write(self, tensors: Tensors, directory: str) -> Path:
        # In a folder of its own, as safetensors writes to a temporary file first and chooses the mode of the file.
        folder = Path(tempfile.mkdtemp(prefix=f"{owned_prefix()}{self.client.instance}-", dir=directory))
        try:
            written = folder / "chunk.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, written)
            written.chmod(0o600)
            return written.rename(folder.with_name(f"{folder.name}.safetensors"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class NCCLTransport(ServerTransport):
    """Broadcasts each chunk over the group that `client.form_communicator` has formed."""

    def send(self, tensors: Tensors) -> None:
        tensors = [(name, tensor.to(torch.accelerator.current_accelerator())) for name, tensor in tensors]
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
        # NCCL reads them in other streams, which do not wait for the kernels that produce them.
        torch.accelerator.synchronize()
        self.client.broadcast(metadata, tensors)


def _check_prompt(theirs: list[int] | None, ours: list[int]) -> None:
    if theirs != ours:
        raise PublishError(
            f"The engine makes another prompt of the same picture and text: {_described(theirs)}, the learner {_described(ours)}. Its image "
            "processor, or what it was sent, is not the learner's."
        )


def _described(ids: list[int] | None) -> str:
    return "nothing" if ids is None else f"{len(ids)} tokens {ids}"


def _differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return in what two replicas differ that must not: they are on devices of their own, and one may have been
    started again."""
    own = ("device", "published", "replica")
    return sorted(name for name in first if name not in own and other.get(name) != first[name])


def _json(response) -> dict[str, Any]:
    try:
        return response.json()
    except ValueError as error:
        raise PublishError(f"{response.url} answered something else than JSON: {response.text[:200]!r}") from error


def _cannot_write(directory: str, num_bytes: int, error: Exception) -> str:
    try:
        free = f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB are free there"
    except OSError as missing:
        free = str(missing)
    return (
        f"A chunk of weights of {num_bytes / 2**20:.1f} MiB could not be written to the transfer directory {directory!r} ({error}); "
        f"{free}. Make room, start the server with `trl-qarl vllm-serve --transfer_dir DIR` on a larger file system, or give a "
        "container more shared memory (`docker run --shm-size 2g`)."
    )


def num_bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)
