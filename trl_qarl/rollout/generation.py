"""Rollouts in vLLM with the learner's low-bit weights: TRL's generation backend with this package's weight sync."""

import logging
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from typing_extensions import override

from ..checkpoint.export import save_configuration
from ..engines.answers import BadAnswer, check_answer, vocabulary_size
from ..engines.background import BackgroundCall
from ..engines.client import QaRLClient
from ..engines.engine import Engine
from ..engines.http_session import ServerLost, is_local, server_urls
from ..engines.in_process import make_engine, share_engine
from ..engines.pictures import placeholders_of, with_pictures
from ..engines.server import ServerEngine, server_process, start_command
from ..engines.server_process import ServerProcess
from ..engines.servers import Servers
from ..engines.spec import EngineSpec
from ..quantization.names import base_model, has_tower
from ..quantization.storage import is_sharded, writes_to
from ..sync.channels import choose_channel
from ..sync.publisher import Publisher, check_ranks, largest_chunk
from .failures import EngineLost, PromptTooLong, all_or_none, to_engine_lost, with_retries


logger = logging.getLogger(__name__)

BACKOFF_SECONDS = 2.0
"""Wait before the second attempt; it doubles before each further one."""

_GATHERS = "the main process gathers what it publishes"
"""Message to the other processes before the outcome of a publication: they take part in it."""

_IN_CLEAR = (
    "Whoever reads that network also reads the session's token, with which it could change the weights. On a network that others "
    "can read, forward the port with `ssh -N -L 8000:127.0.0.1:8000 HOST` and connect to 127.0.0.1."
)

_GENERATING, _PUBLISHING = "Generating with vLLM", "Publishing to vLLM"

_ANSWER = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")


class QaRLVLLMGeneration(VLLMGeneration):
    """
    TRL's backend for a learner prepared by [`prepare_model`]. `options`, a [`QaRLConfig`], are those of server and
    connection, `dtype` is the engine's, and `weight_version` returns the name of the learner's current weights.

    Only the main process has the `engine` of a server and its `description` ([`Engine.describe`]). A `server` that was
    started here is restarted when it ends. `publication` has the measurements of the last publication, and
    `published_version` is the version that it has stamped on the engine's weights.
    """

    def __init__(self, *args, options: Any, dtype: torch.dtype, weight_version: Callable[[], str], **kwargs):
        self.options, self.dtype, self.weight_version = options, dtype, weight_version
        self.server: ServerProcess | None = None
        self.publication: dict[str, float] = {}
        self.published_version: str | None = None
        self.engine: Any = None
        self.description: dict[str, Any] = {}
        self.context_length: int | None = None
        self._published: tuple[str, list[tuple[int, ...]]] | None = None
        self._in_flight: BackgroundCall | None = None
        self._launched: BackgroundCall | None = None
        # False while a `rollout_func` asks, possibly for text or other log-probs; its result is checked later.
        self._is_generating = False
        super().__init__(*args, **kwargs)

    @override
    def _init_vllm(self):
        """Connects to a server, or builds an engine, and checks that it fits the learner."""
        with all_or_none(self.accelerator):
            if self.mode != "server":
                self._build_engine()
            elif self.accelerator.is_main_process:
                self._connect()
            else:
                self.publisher = Publisher(self.model, self.dtype, None, self.processing_class)
        # Only the main process knows a server.
        context = [self.description.get("max_model_len")]
        broadcast_object_list(context, from_process=0)
        self.context_length = context[0]

    def _connect(self) -> None:
        options = self.options
        urls = server_urls(self.server_base_url) or [f"http://{self.server_host}:{self.server_port}"]
        if options.vllm_server_autostart:
            spec = self._own_spec()
            if self.accelerator.device.type != "cpu":
                check_ranks(self.model, spec.quantization_config, options.vllm_tensor_parallel_size)
            self.server = server_process(options, spec, self.model, largest_chunk(self.model, self.dtype))
            self.server.start()
            self.server.wait(urls[0], self.server_timeout)
        clients: list[QaRLClient] = []
        try:
            engines = [self._connect_to(url, number, clients) for number, url in enumerate(urls)]
            self._use(engines[0] if len(engines) == 1 else Servers(engines))
            context = self.description.get("max_model_len")
            if context is not None and self.max_completion_length > context:
                raise ValueError(
                    f"max_completion_length={self.max_completion_length} is more than the server's context of {context} tokens, so it would "
                    "refuse each request. Lower it, or start a server with a larger `--max-model-len` (`vllm_max_model_length`)."
                )
        except BaseException:
            # A trainer that does not fit must not keep servers until it is garbage-collected.
            for client in clients:
                client.close_session()
            raise
        # TRL calls the first client, and so may a `rollout_func`.
        self.vllm_client = clients[0]
        self.vllm_client.generate = self._completions

    def _connect_to(self, url: str, number: int, clients: list[QaRLClient]) -> ServerEngine:
        """Return the engine of a server, after adding its client to `clients`. Each server has an NCCL group, at a
        port of its own."""
        client = QaRLClient(
            url,
            self.group_port + number,
            self.server_timeout,
            token=None if self.server is None else self.server.token,
            token_file=self.options.vllm_token_file,
            start_command=start_command(self.options, EngineSpec.of(self.model, self.dtype)),
        )
        if any(client.instance == other.instance for other in clients):
            raise ValueError(f"vllm_server_base_url={self.server_base_url!r} names a server twice. Name each once.")
        clients.append(client)
        client.placeholders = placeholders_of(self.model, self.processing_class)
        channel, reason = choose_channel(client, self.accelerator.device)
        logger.info("Weights reach the server at %s by %s: %s.", url, type(channel).__name__, reason)
        if not is_local(urlsplit(url).hostname):
            logger.warning("Nothing between this host and %s is encrypted. %s", url, _IN_CLEAR)
        channel.connect()
        return ServerEngine(client, channel)

    def _own_spec(self) -> EngineSpec:
        """Return the specification of an engine that is started here. It reads configuration and tokenizer from a
        folder: the learner's may differ from those of its name, by new tokens, settings or a revision."""
        # A path that stays the same, because vLLM's cache of compiled graphs depends on it.
        folder = Path(self.options.output_dir, f".engine-{self.accelerator.process_index}").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_configuration(base_model(self.model), folder, self.dtype, self.processing_class)
        return replace(EngineSpec.of(self.model, self.dtype), model=str(folder))

    def _build_engine(self) -> None:
        spec = self._own_spec()
        check_ranks(self.model, spec.quantization_config, self.tensor_parallel_size)
        shared, group = share_engine(self.accelerator, self.tensor_parallel_size)
        if group is not None:
            self.tp_group = group
        engine = make_engine(
            spec,
            **shared,
            on_cpu=self.accelerator.device.type == "cpu",
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            enable_sleep_mode=self.enable_sleep_mode,
            # vLLM's profiler reserves memory for its default of 32,768, which is never needed.
            max_num_batched_tokens=4096,
            trust_remote_code=self.trust_remote_code,
        )
        self.llm = engine.llm
        # Completions are read as token ids. Text, which vLLM makes of each token in turn, is needed for stop strings.
        if not self.generation_kwargs.get("stop"):
            self.generation_kwargs = {"detokenize": False} | self.generation_kwargs
        if has_tower(self.model):
            placeholders = placeholders_of(self.model, self.processing_class)
            self.llm.generate = with_pictures(self.llm.generate, placeholders)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        self.publisher = Publisher(self.model, self.dtype, engine, self.processing_class)
        self.description = self.publisher.check_engine()
        if self.description["device"] == "cpu" and "seed" in self.generation_kwargs:
            raise ValueError(
                f"generation_kwargs={self.generation_kwargs} has a seed, and the engine runs on a CPU: there vLLM crashes on a request "
                "with a seed if its prompt is prefilled in pieces. Remove it; `seed` of the configuration stays."
            )
        logger.info("vLLM engine on %s, kernels %s", self.description["device"], self.description["kernels"])

    @override
    def sync_weights(self):
        """
        Publishes the learner's low-bit tensors, when no request is in flight: vLLM would cut it short and report
        success. A failure raises [`EngineLost`], with a server on every process.
        """
        if self.mode == "colocate":
            self._publish_directly()
        else:
            with_retries(_PUBLISHING, self._publish_to_server)
        self._published = self._learner_state()

    def is_published(self) -> bool:
        """Return whether the last publication was of this update, and no parameter of any process was written to
        since, except through `.data`, which is not seen."""
        return all(gather_object([self._learner_state() == self._published]))

    def forget_published(self) -> None:
        """Have [`~QaRLVLLMGeneration.is_published`] return `False` until the next publication."""
        self._published = None

    def _learner_state(self) -> tuple[str, list[tuple[int, ...]]]:
        return self.weight_version(), [writes_to(parameter) for parameter in self.model.parameters()]

    @override
    def generate(self, prompts, images, num_generations, profiler=None):
        """
        Returns only completions that were sampled with the published weights, or raises [`EngineLost`]. A lost server
        is filled again, in which every process takes part.
        """

        def attempt(failed: int) -> tuple:
            if failed:
                self._publish_to_server(failed)
            return self._generate_once(prompts, images, num_generations, profiler)

        return attempt(0) if self.mode == "colocate" else with_retries(_GENERATING, attempt)

    def launch(self, prompts: list[list[int]], num_generations: int) -> BackgroundCall:
        """Have a thread of the main process ask the server for the completions of all processes, which all have to
        call this. Each of this process' `prompts`, token ids, is repeated for its `num_generations` completions."""
        in_flight = BackgroundCall()
        self.collect(in_flight, prompts, num_generations)
        return in_flight

    def collect(self, in_flight: BackgroundCall, prompts: list[list[int]], num_generations: int) -> tuple:
        """Wait for a launched request and return what [`~QaRLVLLMGeneration.generate`] returns. A failure raises
        [`EngineLost`] on every process; there is no retry, as the learner may have other weights by now."""
        self._in_flight = in_flight
        try:
            return self._generate_once(prompts, None, num_generations)
        finally:
            self._in_flight = None

    def _check_lengths(self, prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts), default=0)
        if self.context_length is not None and longest >= self.context_length:
            raise PromptTooLong(
                f"A prompt has {longest} tokens, and the engine's context {self.context_length}, which leaves no room for a completion. "
                "Raise `vllm_max_model_length`, or `--max-model-len` of a server that you started, or filter the dataset by "
                "the number of tokens."
            )

    def _generate_once(self, prompts, images, num_generations, profiler=None):
        with all_or_none(self.accelerator):
            self._check_lengths(prompts)
        self._is_generating = True
        # TRL takes even an empty list for pictures.
        images = images and [pictures or None for pictures in images]
        try:
            output = super().generate(prompts, images, num_generations, profiler)
            if self.mode == "colocate":
                # Each process checks its own completions. Those of a server were checked when they arrived.
                answer = dict(zip(_ANSWER, output, strict=True))
                self._check_answer(answer, prompts, num_generations=1)
                self._check_weight_version()
        except Exception as error:
            raise to_engine_lost(error, f"{_GENERATING} failed") from error
        finally:
            self._is_generating = False
        return output

    def _check_answer(self, answer: dict[str, Any], prompts: list[list[int]], num_generations: int) -> None:
        vocab_size = vocabulary_size(self.model)
        try:
            check_answer(answer, prompts, num_generations, self.max_completion_length, vocab_size)
        except BadAnswer as error:
            raise BadAnswer(
                f"The completions are malformed: {error} The engine runs {self.description.get('kernels')} on "
                f"{self.description.get('device')}."
            ) from None

    @override
    def _place_features(self, features, prompt_ids):
        """Returns the pictures as they are: the server finds their places itself."""
        return features

    def _check_weight_version(self) -> None:
        stamped = self.engine.weight_version()
        if stamped != self.published_version:
            raise EngineLost(
                f"The completions were sampled with weights of version {stamped!r}, but version {self.published_version!r} was "
                "published: something else has changed the engine's weights."
            )

    def pop_publication(self) -> dict[str, float]:
        """Return the measurements of the last publication, only once."""
        publication, self.publication = self.publication, {}
        return publication

    def stop_server(self) -> None:
        """Stop a server that was started here; the next use starts it again."""
        if self.server is not None:
            if self.accelerator.is_main_process:
                self.vllm_client.close_session()
            self.server.stop()

    def _publish(self) -> None:
        # The step is not unique: training can begin again at 0, and another trainer has the same steps.
        version = f"{self.weight_version()}-{secrets.token_hex(4)}"
        self.publication = self.publisher.publish(version)
        self.published_version = version

    def _publish_directly(self) -> None:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            if self._llm_weights_sleeping:
                # Sleeping has discarded the weights.
                self.publisher.forget()
            self._llm_weights_sleeping = False
        try:
            self._publish()
        except Exception as error:
            raise to_engine_lost(error, f"{_PUBLISHING} failed") from error

    def _publish_to_server(self, failed: int) -> None:
        """Publish from the main process, after getting the server back if attempts have failed. All processes gather
        sharded masters together, and raise the main process' error."""
        if self._launched is not None:
            self._launched.wait()
        outcome: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                if failed:
                    self._recover(failed)
                elif self.engine.rejoin():
                    self.publisher.forget()
                if is_sharded(self.model):
                    broadcast_object_list([_GATHERS], from_process=0)
                self._publish()
                outcome = [self.publication]
            except Exception as error:
                outcome = [to_engine_lost(error, f"{_PUBLISHING} failed")]
        broadcast_object_list(outcome, from_process=0)
        if outcome[0] == _GATHERS:
            self.publisher.join()
            broadcast_object_list(outcome, from_process=0)
        if isinstance(outcome[0], EngineLost):
            raise outcome[0]
        self.publication = outcome[0]

    def _completions(self, *args, **kwargs) -> dict[str, Any]:
        """Return completions, or an error in their place so that every process raises it. A launched request has no
        completions yet."""
        is_own, in_flight = self._is_generating, self._in_flight
        request = partial(self._ask, is_own, *args, **kwargs)
        try:
            if not is_own:
                return with_retries(_GENERATING, partial(self._ask_alone, request))
            if in_flight is None:
                return request()
            if in_flight.is_started:
                return in_flight.answer()
            in_flight.start(request)
            self._launched = in_flight
            return dict.fromkeys(_ANSWER, ())
        except Exception as error:
            return dict.fromkeys(_ANSWER, to_engine_lost(error, f"{_GENERATING} failed"))

    def _ask_alone(self, request: Callable[[], dict[str, Any]], failed: int) -> dict[str, Any]:
        """Send the request of a `rollout_func`, in which other processes take no part."""
        if failed:
            if is_sharded(self.model):
                raise EngineLost(
                    "A `rollout_func` has lost the server, and all processes are needed to fill it again."
                )
            self._recover(failed)
            self._publish()
        return request()

    def _ask(self, is_own: bool, prompts, features=None, *args, **sampling) -> dict[str, Any]:
        try:
            completions = self.engine.generate(prompts, features, *args, **sampling)
            if is_own:
                self._check_answer(completions, prompts, sampling["n"])
        except BadAnswer as error:
            raise ServerLost(str(error)) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # TRL's client does not check the answer before it takes it apart.
            raise ServerLost(f"The completions cannot be read: {type(error).__name__}: {error}") from error
        # Check now: nothing else is asked of the server before the completions have been rewarded.
        self._check_weight_version()
        return completions

    def _recover(self, failed: int) -> None:
        """Reconnect to the server, or to one that was started in its place, or raise [`ServerLost`]."""
        self.engine.close_session()
        time.sleep(min(BACKOFF_SECONDS * 2.0 ** (failed - 1), 30.0))
        try:
            if self.server is not None and not (self.server.is_running and self.vllm_client.is_healthy()):
                # Restart even if the process runs: vLLM's server keeps running after its engine dies. If the process
                # is gone, whatever answers on the port is not ours.
                self.server.stop()
                self.server.start()
                self.server.wait(self.vllm_client.base_url, self.server_timeout)
            self.publisher.forget()
            if self.engine.reconnect(self.server_timeout):
                logger.warning("The vLLM server was restarted; all weights are published again.")
        except (OSError, RuntimeError, ValueError) as error:
            raise ServerLost(str(error)) from error
        self.description = self.publisher.check_engine()
