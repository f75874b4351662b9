"""
Rollouts in vLLM with the learner's low-bit weights: TRL's generation backend with our publication in place of its own.

The seam is TRL's `VLLMGeneration`: the trainer calls `sync_weights()` when the optimizer step has changed and
`generate()`.
"""

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from typing_extensions import override

from ..quantization.parameters import writes_to
from .ahead import InFlight
from .answers import BadAnswer, check_answer, vocabulary_size
from .client import QaRLClient
from .engines import make_engine, share_engine
from .failures import EngineLost, all_or_none, as_lost, persistently
from .http_session import ServerLost
from .http_transport import choose_transport, sends_changes
from .pictures import placeholders_of, takes_pictures, with_pictures
from .publisher import Publisher
from .server_process import ServerProcess
from .transports import DirectTransport, NCCLTransport


__all__ = ["QaRLVLLMGeneration"]

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = 2.0
"""Waited before the second attempt, twice as long before each further one."""

_GATHERS = "the main process gathers what it publishes"
"""Message to the other processes before the outcome of a publication, in which they then take part."""

_GENERATING = "Generating with vLLM"

_ANSWER = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")


class QaRLVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for a learner prepared by [`prepare_model`].

    Args:
        dtype (`torch.dtype`):
            Dtype in which the engine runs the model.
        weight_version (`Callable[[], str]`):
            Gives the name of the learner's current weights.
        server ([`ServerProcess`], *optional*):
            A server to start, and to start again when it ends.
        request_timeout (`float`, *optional*, defaults to `300.0`), generation_timeout (`float`, *optional*, defaults
            to `1800.0`): Seconds that a server has to answer, and to generate.
        token_file (`str`, *optional*):
            File with the secret of a server that was started otherwise.
        start_command (`str`, *optional*):
            What starts a server, for the error where none answers.
        in_flight_updates (`bool`, *optional*, defaults to `False`):
            Whether what is launched goes on with weights that are published meanwhile, in place of being waited for.

    All other arguments are those of the parent class.

    Attributes:
        publication (`dict[str, float]`):
            Measurements of the last publication.
        published_version (`str` or `None`):
            What the last publication has stamped on the engine's weights.
        engine (`dict[str, Any]`):
            The engine's description of itself.
    """

    def __init__(
        self,
        *args,
        dtype: torch.dtype,
        weight_version: Callable[[], str],
        server: ServerProcess | None = None,
        request_timeout: float = 300.0,
        generation_timeout: float = 1800.0,
        token_file: str | None = None,
        transport: str = "auto",
        allow_plain_http: bool = False,
        ca_certs: str | None = None,
        delta_sync: bool | None = None,
        start_command: str = "trl-qarl vllm-serve",
        in_flight_updates: bool = False,
        **kwargs,
    ):
        self.dtype = dtype
        self.weight_version = weight_version
        self.server = server
        self.request_timeout = request_timeout
        self.generation_timeout = generation_timeout
        self.token_file = token_file
        self.transport, self.allow_plain_http, self.ca_certs = transport, allow_plain_http, ca_certs
        self.delta_sync = delta_sync
        self.start_command, self.in_flight_updates = start_command, in_flight_updates
        self.publication: dict[str, float] = {}
        self.published_version: str | None = None
        self.engine: dict[str, Any] = {}
        self._published_parameters: list[tuple[int, ...]] | None = None
        self._in_flight: InFlight | None = None
        self._launched: list[InFlight] = []
        # A `rollout_func` may ask TRL's client for text, or for other log-probs; what it returns is checked.
        self._is_generating = False
        super().__init__(*args, **kwargs)

    @override
    def _init_vllm(self):
        """Connects to a server, or builds an engine, that was made for the learner's scheme, and checks that it
        was."""
        with all_or_none(self.accelerator):
            if self.mode != "server":
                self._build_engine()
            elif self.accelerator.is_main_process:
                self._connect()
            else:
                self._follower = Publisher(self.model, self.dtype, None, self.processing_class)

    def _connect(self) -> None:
        base_url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        if self.server is not None:
            self.server.start()
            self.server.wait(base_url, self.server_timeout)
        self.vllm_client = QaRLClient(
            base_url,
            self.group_port,
            self.server_timeout,
            self.request_timeout,
            self.generation_timeout,
            token=None if self.server is None else self.server.token,
            token_file=self.token_file,
            ca_certs=self.ca_certs,
            start_command=self.start_command,
        )
        try:
            self.vllm_client.placeholders = placeholders_of(self.processing_class)
            transport, reason = choose_transport(self.vllm_client, self.transport, self.allow_plain_http)
            logger.info("Weights reach the server by %s: %s.", type(transport).__name__, reason)
            transport.is_drawing = lambda: any(in_flight.is_running for in_flight in self._launched)
            self.delta_sync = sends_changes(transport, self.delta_sync)
            if isinstance(transport, NCCLTransport):
                self.vllm_client.form_communicator(self.accelerator.device)
            self._set_publisher(transport)
        except BaseException:
            # A trainer that the engine does not fit must not keep the server until it is garbage-collected.
            self.vllm_client.close_session()
            raise
        self._keep_trying()

    def _keep_trying(self) -> None:
        """Have answers to TRL's client be checked, and what fails reach every process with the completions."""
        generate = self.vllm_client.generate
        self.vllm_client.generate = lambda *args, **kwargs: self._completions(
            partial(generate, *args, **kwargs), kwargs
        )
        # The server processes pictures together with their prompts.
        self.vllm_client.image_features = lambda images: images

    def _build_engine(self) -> None:
        shared, group = share_engine(self.accelerator, self.tensor_parallel_size)
        if group is not None:
            self.tp_group = group
        self.llm = make_engine(
            self.model,
            self.dtype,
            **shared,
            on_cpu=self.accelerator.device.type == "cpu",
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            enable_sleep_mode=self.enable_sleep_mode,
            model_impl=self.model_impl,
            # vLLM's memory profiler takes its default, 32,768, for memory that is really needed.
            max_num_batched_tokens=4096,
            trust_remote_code=self.trust_remote_code,
        )
        if takes_pictures(self.model):
            self.llm.generate = with_pictures(self.llm.generate, placeholders_of(self.processing_class))
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self._set_publisher(DirectTransport(self.llm))

    def _set_publisher(self, transport) -> None:
        self.publisher = Publisher(self.model, self.dtype, transport, self.processing_class, bool(self.delta_sync))
        self.engine = self.publisher.check_engine()
        if self.engine["device"] == "cpu" and "seed" in self.generation_kwargs:
            raise ValueError(
                f"generation_kwargs={self.generation_kwargs} has a seed, and the engine runs on a CPU: there vLLM dies of a request "
                "with one whose prompt is prefilled in pieces. Remove it; `seed` of the configuration stays."
            )
        logger.info("vLLM engine on %s, kernels %s", self.engine["device"], self.engine["kernels"])

    @override
    def sync_weights(self):
        """
        Publishes the learner's low-bit tensors, with nothing in flight, which vLLM would cut short and call a success,
        but with `in_flight_updates`. What fails is [`EngineLost`]: from a server on every process, from an engine in
        this process on this one.
        """
        while self._launched and not self.in_flight_updates:
            self._launched.pop().wait()
        if self.mode == "colocate":
            self._publish_directly()
        else:
            outcome: list[Any] = [None]
            if self.accelerator.is_main_process:
                try:
                    self._publish_alone()
                    outcome = [self.publication]
                except EngineLost as error:
                    outcome = [error]
            broadcast_object_list(outcome, from_process=0)
            while outcome[0] == _GATHERS:
                self._follower.join()
                broadcast_object_list(outcome, from_process=0)
            if isinstance(outcome[0], EngineLost):
                raise outcome[0]
            self.publication = outcome[0]
        self._published_parameters = self._parameter_versions()

    def is_published(self) -> bool:
        """Return whether no parameter of any process was written to since the last publication, but through
        `.data`."""
        is_published = self._parameter_versions() == self._published_parameters
        if self.accelerator.num_processes == 1:
            return is_published
        return all(gather_object([is_published]))

    def _parameter_versions(self) -> list[tuple[int, ...]]:
        return [writes_to(parameter) for parameter in self.model.parameters()]

    @override
    def generate(self, prompts, images, num_generations, profiler=None):
        """
        As the parent's; completions that cannot be what was sampled, or that are from other weights than those
        published, are a failure. A server that was lost is filled again, in which every process has a part; what fails
        is [`EngineLost`].
        """
        request = partial(self._generate_once, prompts, images, num_generations, profiler)
        if self.mode == "colocate":
            return request()
        return persistently(_GENERATING, request, lambda attempt: self.sync_weights())

    def launch(self, prompts: list[list[int]], num_generations: int) -> InFlight:
        """Have a thread of the main process ask the server for completions of every process' prompts; all have to
        call."""
        in_flight = InFlight(prompts, num_generations)
        self.collect(in_flight)
        return in_flight

    def collect(self, in_flight: InFlight) -> tuple:
        """
        Wait for what was launched, and return what [`~QaRLVLLMGeneration.generate`] does. What failed is
        [`EngineLost`] on every process, and is not tried again, as the learner may have other weights by now.
        """
        self._in_flight = in_flight
        try:
            return self._generate_once(in_flight.prompts, None, in_flight.num_generations)
        finally:
            self._in_flight = None

    def _generate_once(self, prompts, images, num_generations, profiler=None):
        self._is_generating = True
        # TRL takes a list for pictures, also an empty one.
        images = images and [pictures or None for pictures in images]
        try:
            output = super().generate(prompts, images, num_generations, profiler)
            if self.mode == "colocate":
                # On each process for its own prompts. A server's are checked when they arrive.
                answer = dict(zip(_ANSWER, output, strict=True))
                self._check_answer(answer, prompts, num_generations=1)
                self._check_weight_version(self.llm.get_weight_version())
        except Exception as error:
            raise as_lost(error, f"{_GENERATING} failed") from error
        finally:
            self._is_generating = False
        return output

    def _check_answer(self, answer: dict[str, Any], prompts: list[list[int]], num_generations: int) -> None:
        vocab_size = vocabulary_size(self.model)
        try:
            check_answer(answer, prompts, num_generations, self.max_completion_length, vocab_size)
        except BadAnswer as error:
            raise BadAnswer(
                f"The completions make no sense: {error} The engine runs {self.engine.get('kernels')} on "
                f"{self.engine.get('device')}."
            ) from None

    @override
    def _place_features(self, features, prompt_ids):
        """Return the pictures as they are: the server finds their places itself."""
        return features

    def _check_weight_version(self, stamped: str) -> None:
        if stamped != self.published_version:
            raise EngineLost(
                f"The completions were sampled with weights of version {stamped!r}, but version {self.published_version!r} was "
                "published: something else changes the engine's weights."
            )

    def pop_publication(self) -> dict[str, float]:
        """Measurements of the last publication, once."""
        publication, self.publication = self.publication, {}
        return publication

    def stop_server(self) -> None:
        """End a server that was started here; the next use starts it again."""
        if self.server is not None:
            if self.accelerator.is_main_process:
                self.vllm_client.close_session()
            self.server.stop()

    def _publish(self) -> dict[str, float]:
        # The step is not enough: training can begin again at 0, and another trainer has steps of the same number.
        version = f"{self.weight_version()}-{secrets.token_hex(4)}"
        if self.mode == "server" and self.publisher.takes_all_processes:
            # The others are where it ends.
            broadcast_object_list([_GATHERS], from_process=0)
        publication = self.publisher.publish(version)
        self.published_version = version
        return publication

    def _publish_directly(self) -> None:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            if self._llm_weights_sleeping:
                # Sleeping has discarded them.
                self.publisher.forget()
            self._llm_weights_sleeping = False
        try:
            self.publication = self._publish()
        except Exception as error:
            raise as_lost(error, "Publishing to vLLM failed") from error

    def _publish_alone(self, attempt: int = 0) -> None:
        if attempt and self.publisher.takes_all_processes:
            raise EngineLost("A `rollout_func` has lost the server, which takes all processes to fill.")
        self.publication = persistently("Publishing to vLLM", self._publish, self._recover)

    def _completions(self, generate: Callable[[], dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
        """Returns an error in place of the completions, so that every process raises it. A launched request has none
        yet."""
        is_own, in_flight = self._is_generating, self._in_flight
        # Not by a thread that does not know what is published meanwhile.
        checks_version = in_flight is None or not self.in_flight_updates
        request = partial(self._generate_and_check, generate, asked if is_own else None, checks_version)
        try:
            if not is_own:
                # A `rollout_func` asks, only on this process.
                return persistently(_GENERATING, request, self._publish_alone)
            if in_flight is None:
                return request()
            if in_flight.is_started:
                completions = in_flight.answer()
                if self.in_flight_updates:
                    self._check_weight_version(self.vllm_client.weight_version())
                return completions
            in_flight.start(request)
            self._launched = [*(other for other in self._launched if other.is_running), in_flight]
            return dict.fromkeys(_ANSWER, ())
        except Exception as error:
            return dict.fromkeys(_ANSWER, as_lost(error, f"{_GENERATING} failed"))

    def _generate_and_check(
        self, generate: Callable[[], dict[str, Any]], asked: dict[str, Any] | None, checks_version: bool
    ) -> dict[str, Any]:
        try:
            completions = generate()
            if asked is not None:
                self._check_answer(completions, asked["prompts"], asked["n"])
        except BadAnswer as error:
            raise ServerLost(str(error)) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # TRL's client takes the answer apart without a look at it.
            raise ServerLost(f"The completions cannot be read: {type(error).__name__}: {error}") from error
        # Now and not when they have been rewarded: nothing is asked of the server until the next completions.
        if checks_version:
            self._check_weight_version(self.vllm_client.weight_version())
        return completions

    def _recover(self, attempt: int) -> None:
        """
        Get back to a server that can take a publication: the same one, or one that was started in its place.

        Raises:
            ServerLost: if there is none, or if starting one fails.
        """
        self.vllm_client.close_session()
        time.sleep(min(BACKOFF_SECONDS * 2.0 ** (attempt - 1), 30.0))
        try:
            if self.server is not None and not (self.server.is_running and self.vllm_client.is_healthy()):
                # Also where the server still runs: one whose engine has died does not end by itself. Where it does
                # not, whoever answers in its place is somebody else.
                self.server.stop()
                self.server.start()
                self.server.wait(self.vllm_client.base_url, self.server_timeout)
            self.publisher.forget()
            if self.vllm_client.reconnect(self.server_timeout):
                logger.warning("The vLLM server was restarted; all weights are published again.")
            self.vllm_client.renew_communicator(self.accelerator.device)
        except (OSError, RuntimeError, ValueError) as error:
            raise ServerLost(str(error)) from error
        self.engine = self.publisher.check_engine()
