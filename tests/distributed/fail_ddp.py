"""
Trainings on two processes, each with an engine of its own, of which one fails at step 2, and what each rank raised.
Run by train_ddp.py, last: nothing is put back. The fault campaign has two processes that share a server.
"""

from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from datasets import Dataset

from trl_qarl import QaRLConfig, QaRLTrainer, qarl_trainer
from trl_qarl.rollout import generation
from trl_qarl.rollout.generation import QaRLVLLMGeneration
from trl_qarl.wire.protocol import PublishError


class Engine:
    """An engine in this process and its publisher in one; fails at `what` from the third time on."""

    def __init__(self, what, failure):
        self.what, self.failure, self.version = what, failure, None
        self.counts = {"publish": 0, "generate": 0}

    def fails_at(self, what):
        self.counts[what] += 1
        fails = self.failure is not None and what == self.what and self.counts[what] > 2
        if fails and isinstance(self.failure, Exception):
            raise self.failure
        return fails

    def publish(self, version):
        self.fails_at("publish")
        self.version = version
        return {"publish/seconds": 0.0}

    def generate(self, prompts, sampling_params=None, **kwargs):
        logprob = SimpleNamespace(logprob=float("nan") if self.fails_at("generate") else -5.5, rank=1)
        tokens = [[17 + i + j for j in range(4)] for i in range(len(prompts))]
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=ids, logprobs=[{token: logprob} for token in ids])],
            )
            for prompt, ids in zip(prompts, tokens, strict=True)
        ]

    check_engine = forget = lambda self: {}
    weight_version = lambda self: self.version  # noqa: E731


def run(model, folder, what, failure):
    rank = PartialState().process_index

    class Generation(QaRLVLLMGeneration):
        def _build_engine(self):
            if what == "start" and rank == 1:
                raise ValueError("a port is taken")
            self.llm = self.engine = self.publisher = Engine(what, failure if rank == 1 else None)

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
                vllm_mode="colocate",
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
    failures = {
        "publish": ("publish", PublishError("a tensor differs")),
        "generate": ("generate", RuntimeError("out of memory")),
        "nan": ("generate", "nan"),
        "start": ("start", None),
    }
    return {name: run(model, Path(output_dir, name), *failure) for name, failure in failures.items()}
