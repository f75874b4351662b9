"""
Trainings on two processes of which the server, or one process, fails at step 2, and what each rank raised. Run by train_ddp.py,
last: nothing is put back.
"""

from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from datasets import Dataset

from trl_qarl import QaRLConfig, QaRLTrainer, qarl_trainer
from trl_qarl.rollout import generation
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.rollout.http_session import ServerLost
from trl_qarl.wire.protocol import PublishError


class Engine:
    """Server, engine in this process, and publisher in one; fails at `what` from the third time on."""

    base_url = "http://server"

    def renew_communicator(self, device):
        pass

    def __init__(self, what, failure):
        self.what, self.failure = what, failure
        self.counts = {"publish": 0, "generate": 0, "start": 0}
        self.version = None

    def fail_at(self, what):
        self.counts[what] += 1
        if what == self.what and self.counts[what] > 2 and isinstance(self.failure, Exception):
            raise self.failure

    def publish(self, version):
        self.fail_at("publish")
        self.version = version
        return {"publish/seconds": 0.0}

    def generate(self, prompts, n=1, max_tokens=4, sampling_params=None, **kwargs):
        self.fail_at("generate")
        is_broken = self.failure == "nan" and self.counts["generate"] > 2
        logprob = float("nan") if is_broken else -5.5
        tokens = [[17 + i + j for j in range(4)] for i in range(n * len(prompts))]
        if sampling_params is None:
            logprobs = [[[None if is_broken else logprob]] * 4 for _ in tokens]
            sampled = [[[token] for token in ids] for ids in tokens]
            return {
                "prompt_ids": prompts,
                "completion_ids": tokens,
                "logprobs": logprobs,
                "logprob_token_ids": sampled,
            }
        logprob = SimpleNamespace(logprob=logprob, rank=1)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=ids, logprobs=[{token: logprob} for token in ids])],
            )
            for prompt, ids in zip(prompts, tokens, strict=True)
        ]

    image_features = close_session = forget = check_engine = lambda self, *args: {}
    get_server_info = lambda self: {"model_config": {"logprobs_mode": "processed_logprobs"}}  # noqa: E731
    weight_version = get_weight_version = lambda self: self.version
    is_healthy = lambda self: self.failure is None  # noqa: E731
    reconnect = lambda self, timeout: True  # noqa: E731


def run(model, folder, mode, failing_rank, what, failure):
    rank = PartialState().process_index

    class Generation(QaRLVLLMGeneration):
        def _connect(self):
            self.vllm_client = self.publisher = Engine(what, failure)
            self._keep_trying()

        def _build_engine(self):
            self.llm = self.publisher = Engine(what, failure if rank == failing_rank else None)

        def _init_vllm(self):
            if what == "start" and rank == failing_rank:
                self._connect = self._build_engine = self.refuse
            super()._init_vllm()

        def refuse(self):
            raise ValueError("a port is taken")

    qarl_trainer.QaRLVLLMGeneration = Generation
    try:
        trainer = QaRLTrainer(
            model,
            lambda completions, **kwargs: [len(text) / 9 for text in completions],
            QaRLConfig(
                str(folder),
                use_cpu=True,
                bf16=False,
                use_vllm=True,
                vllm_mode=mode,
                vllm_max_model_length=128,
                report_to=[],
                max_steps=4,
                per_device_train_batch_size=2,
                num_generations=4,
                steps_per_generation=1,
                max_completion_length=4,
                save_strategy="no",
                disable_tqdm=True,
            ),
            Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]}),
        )
        trainer.train()
        raised = "nothing"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "files": sorted(path.name for path in folder.glob("checkpoint-*/*"))}


def run_all(model, output_dir):
    generation.BACKOFF_SECONDS = 0.0
    lost = ServerLost("no server answers")
    failures = {
        "server_publish": ("server", 0, "publish", lost),
        "server_generate": ("server", 0, "generate", lost),
        "server_start": ("server", 0, "start", None),
        "server_nan": ("server", 0, "generate", "nan"),
        "colocate_publish": ("colocate", 1, "publish", PublishError("a tensor differs")),
        "colocate_generate": ("colocate", 1, "generate", RuntimeError("out of memory")),
        "colocate_nan": ("colocate", 1, "generate", "nan"),
        "colocate_start": ("colocate", 1, "start", None),
    }
    return {name: run(model, Path(output_dir, name), *failure) for name, failure in failures.items()}
