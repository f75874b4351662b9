"""vLLM in this process: engines for a prepared learner and for an export, and how tensors reach them."""

import gc
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..bitwise import cuda
from ..checkpoint.export import is_export
from ..wire.protocol import FILE_BACKEND, PublishError, values_of
from .engine import Tensors
from .pictures import check_prompt, sent_ids
from .server_command import cpu_environment
from .spec import EngineSpec


class InProcessEngine:
    """An [`~trl_qarl.engines.engine.Engine`] in this process, which takes tensors directly. The worker of `llm`, a
    `vllm.LLM`, must be in this process too (`distributed_executor_backend` `"uni"` or `"external_launcher"`)."""

    works_meanwhile = False
    in_every_process = True

    def __init__(self, llm):
        self.llm = llm
        worker = llm.llm_engine.model_executor.driver_worker
        self._worker = getattr(worker, "worker", worker)

    def describe(self) -> dict[str, Any]:
        return self._call("qarl_describe")

    def _call(self, method: str, *args: Any) -> Any:
        return values_of([getattr(self._worker, method)(*args)])[0]

    def begin(self) -> list[str]:
        self._abort_requests()
        changed = self._call("qarl_begin")
        self._worker.start_weight_update()
        return changed

    def _abort_requests(self) -> None:
        """Abort requests of an interrupted rollout: vLLM would return their completions with the next ones."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if not self.llm.reset_prefix_cache():
            raise PublishError(
                "vLLM could not empty its prefix cache, which holds keys and values of the old weights: a rollout was interrupted "
                "in the middle of a step. Build the engine again."
            )
        # Image embeddings of the old weights.
        self.llm.reset_mm_cache()
        engine.reset_encoder_cache()

    def send(self, tensors: Tensors) -> None:
        from vllm.config import set_current_vllm_config

        engine = self._worker.weight_transfer_engine
        with set_current_vllm_config(self._worker.vllm_config):
            try:
                engine.load((name, tensor.to(engine.device)) for name, tensor in tensors)
            except Exception as error:
                # vLLM's loaders raise any kind of error for unexpected names and shapes.
                raise PublishError(
                    f"The engine could not load {tensors[0][0]} to {tensors[-1][0]}: {type(error).__name__}: {error}"
                ) from error

    def finish(self, fingerprints: dict[str, str], weight_version: str) -> None:
        self._call("qarl_finish", fingerprints)
        self._worker.finish_weight_update()
        self.llm.update_weight_version(weight_version)

    def weight_version(self) -> str:
        return self.llm.get_weight_version()

    def generate(
        self,
        prompts: list[list[int]],
        pictures: Sequence[Any] | None = None,
        seeds: Sequence[int] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Return completions; with `seeds`, one for each prompt, equal prompts differ and runs are repeatable."""
        from trl.generation.vllm_generation import extract_logprobs
        from vllm import SamplingParams

        rows = [_prompt(*row) for row in zip(prompts, pictures or [None] * len(prompts), strict=True)]
        parameters = [SamplingParams(**sampling, seed=seed) for seed in seeds or [None]]
        outputs = self.llm.generate(rows, parameters if seeds else parameters[0], use_tqdm=False)
        logprobs, logprob_token_ids = extract_logprobs(outputs)
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [list(completion.token_ids) for output in outputs for completion in output.outputs],
            "logprobs": logprobs,
            "logprob_token_ids": logprob_token_ids,
        }

    def score(self, token_ids: list[int], pictures: Sequence[Any] = ()) -> list[float]:
        from vllm import SamplingParams

        if self.llm.llm_engine.is_sleeping():
            # The weights are awake; the rollout that follows a publication needs the cache too.
            self.llm.wake_up(tags=["kv_cache"])
        # Greedy: sampling would advance the random state of the rollout.
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        (output,) = self.llm.generate([_prompt(token_ids, pictures)], parameters, use_tqdm=False)
        check_prompt(output.prompt_token_ids, token_ids)
        return [
            entry[token].logprob if entry else math.nan
            for entry, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        ]

    def clear_cache(self) -> None:
        # Sleep mode has discarded the cache and freed its memory.
        if not self.llm.llm_engine.is_sleeping():
            self._call("qarl_clear_cache")

    def close(self) -> None:
        """Shut down the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def _prompt(token_ids: list[int], pictures: Sequence[Any] | None = None) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": sent_ids(token_ids)}
    return prompt | {"multi_modal_data": {"image": list(pictures)}} if pictures else prompt


def load_engine(export_dir: str | Path, **vllm_arguments):
    """
    Load an export as it is deployed: a vLLM engine in this process, with the dtype, the kernels and the log-probs
    (after temperature) of the engine that made the rollouts.

    All vLLM engines of a process share its process groups, which the first engine to end destroys: `del` an engine
    before the next is loaded.

    Args:
        export_dir (`str` or `Path`):
            Folder written by [`export_checkpoint`] with its tokenizer, or by `trl-qarl export`.
        vllm_arguments:
            Further arguments of `vllm.LLM`, such as `max_model_len` or `gpu_memory_utilization`.

    Returns:
        The `vllm.LLM`.

    Raises:
        ValueError: for a folder without an export, or a scheme that vLLM cannot run here.

    Example:

    ```python
    >>> engine = load_engine("outputs/quickstart/w4a16", max_model_len=128)
    >>> engine.generate("23 + 8 =")[0].outputs[0].text
    ```
    """
    folder = Path(export_dir)
    if not is_export(folder):
        raise ValueError(
            f"{str(export_dir)!r} holds no export of trl_qarl. Export masters, or checkpoints of a training, with `trl-qarl export` "
            "or `export_checkpoint`."
        )
    config = json.loads((folder / "config.json").read_text())
    spec = EngineSpec(str(folder), config.get("quantization_config"), config["dtype"], is_export=True)
    return _start(spec, not torch.cuda.is_available(), **vllm_arguments)


def make_engine(spec: EngineSpec, *, on_cpu: bool, **arguments) -> InProcessEngine:
    """Start an engine that waits for a learner's weights; `arguments` are further arguments of `vllm.LLM`."""
    return InProcessEngine(_start(spec, on_cpu, **arguments))


def share_engine(accelerator: Accelerator, size: int) -> tuple[dict[str, Any], dist.ProcessGroup | None]:
    """Form groups of `size` processes that share an engine; every process must call this. Return arguments of
    [`make_engine`], and the group of this process, `None` if the process has an engine to itself."""
    from trl.trainer.utils import ensure_master_addr_port

    count = accelerator.num_processes
    group = None
    if size > 1:
        ranks = [list(range(start, start + size)) for start in range(0, count, size)]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
    if count > 1:
        # vLLM's launcher reads these. They are not set for one process: other libraries would assume a launcher.
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(count)
        ensure_master_addr_port()
    arguments = {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "uni" if count == 1 else "external_launcher",
        # Processes of one engine must draw the same samples.
        "seed": accelerator.process_index // size,
    }
    return arguments, group


def _start(spec: EngineSpec, on_cpu: bool, **arguments):
    """Return a `vllm.LLM` whose worker lives in this process."""
    arguments = spec.arguments(on_cpu) | arguments
    # vLLM reads this when it starts an engine. Tensors can only be given to a worker in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        os.environ.update(cpu_environment())
    elif spec.numerics == "engine":
        cuda.prepare_process()
    from vllm import LLM
    from vllm.distributed import parallel_state

    # A garbage-collected engine destroys the process group that the next engine shares, so collect it now. vLLM has
    # exempted all objects that existed when an engine started from collection.
    gc.unfreeze()
    gc.collect()
    # vLLM keeps the groups of an earlier dense engine and adds no group of experts for a mixture.
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()
    # The transfer backend also selects our kernels, even without a weight sync.
    return LLM(**({"weight_transfer_config": {"backend": FILE_BACKEND}} | arguments))
