"""
Checks claims about DDP, FSDP2 and DeepSpeed on several processes. Each rank writes its results; run by test_shards.py.

`python shards.py FOLDER CLAIM ...` checks some of them, in a folder with the models that test_shards.py makes.
"""

import datetime
import importlib
import json
import re
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path


MODULES = ("sharded_codes", "sharded_checkpoints", "sharded_trainers", "zero", "ddp", "fail_ddp", "sharded_pictures")
NIGHTLY = (
    "zero_1_trains_what_it_trains_with_whole_state",
    "batches_drawn_ahead_train_what_they_train_with_whole_masters",
    "zero_trains_batches_drawn_ahead",
    "pictures_train_what_they_train_with_whole_masters",
    "precisions_in_turn_train_what_they_train_with_whole_masters",
    "zero_skips_updates_without_a_gradient",
    "zero_keeps_the_last_finite_checkpoint",
    "zero_trains_pictures",
    "pictures_are_shown_to_an_engine_in_every_process",
    "the_peak_of_fsdp2_is_what_was_calculated",
    "the_peak_with_masters_on_the_host_is_what_was_calculated",
    "torchao_steps_as_with_whole_masters",
    "replicas_of_shards_train_what_they_train_with_whole_masters",
    "engine_numerics_beside_an_adapter_or_a_reference",
    "zero_trains_an_adapter_a_reference_and_engine_numerics",
    "one_process_goes_on_from_a_checkpoint_of_two",
    "two_processes_go_on_from_a_checkpoint_of_one",
    "zero_resumes_its_own_checkpoints_alone",
    "zero_fills_colocated_engines",
    "a_killed_process_leaves_a_checkpoint",
    "zero_leaves_a_checkpoint_when_a_process_is_killed",
)
CLAIMS = [
    claim
    for path in (Path(__file__).with_name(f"{module}.py") for module in MODULES)
    for claim in re.findall(r"^def (\w+)\(folder\):", path.read_text(), re.MULTILINE)
    if claim not in NIGHTLY
]
"""Functions of a folder alone, found without an import of their modules, which takes long."""
AFTER = {
    "one_process_goes_on_from_a_checkpoint_of_two": ["a_run_goes_on_from_its_checkpoint"],
    "two_processes_go_on_from_a_checkpoint_of_one": [
        "a_run_goes_on_from_its_checkpoint",
        "one_process_goes_on_from_a_checkpoint_of_two",
    ],
    "one_process_trains_with_engine_numerics_what_two_did": ["two_processes_train_with_engine_numerics"],
    "a_killed_process_leaves_a_checkpoint": ["a_run_goes_on_from_its_checkpoint"],
    "zero_resumes_its_own_checkpoints_alone": ["zero_1_trains_what_it_trains_with_whole_state"],
    "zero_leaves_a_checkpoint_when_a_process_is_killed": [
        "zero_1_trains_what_it_trains_with_whole_state",
        "zero_trains_what_it_trains_with_whole_state",
    ],
}
"""Claims that go on from the files of others."""
BY_FOUR = ("replicas_of_shards_train_what_they_train_with_whole_masters",)
ALONE = ("one_process_goes_on_from_a_checkpoint_of_two", "one_process_trains_with_engine_numerics_what_two_did")
BY_ONE = (*ALONE, "zero_resumes_its_own_checkpoints_alone")


def check(names, folder, rank, path):
    """Write what this rank says of each claim."""
    modules, found = [importlib.import_module(name) for name in MODULES], {}
    for name in names:
        start = time.process_time()
        try:
            if not name.startswith("zero_") or find_spec("deepspeed") is not None:
                next(vars(module)[name] for module in modules if name in vars(module))(folder)
            found[name] = "holds"
        except Exception:
            found[name] = traceback.format_exc()
        print(name, rank, f"{time.process_time() - start:.1f} s", found[name], flush=True)
    path.write_text(json.dumps(found))


def run(path, names):
    """Check claims as one of the processes of a launch."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=900))
    check(names, path.parent, dist.get_rank(), path.with_name(f"{path.name}rank{dist.get_rank()}.json"))


def main(folder, asked):
    from forked import fork_ranks

    from testing_utils import importing

    with importing():
        for name in MODULES:
            importlib.import_module(name)
    makes_launches = [name for name in NIGHTLY if "killed" in name]
    last = ["two_processes_go_on_from_a_checkpoint_of_one"]
    first = [name for name in (*CLAIMS, *NIGHTLY) if name not in (*ALONE, *BY_FOUR, *last, *makes_launches)]
    for index, (count, names) in enumerate(((2, first), (1, BY_ONE), (2, last), (4, BY_FOUR))):
        if names := [name for name in names if name in asked]:
            fork_ranks(count, run, folder / f"launch{index}", names)
    for name in makes_launches:
        if name in asked:
            check([name], folder, 0, folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
