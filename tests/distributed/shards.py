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
_FOUND = [
    found
    for path in (Path(__file__).with_name(f"{module}.py") for module in MODULES)
    for found in re.findall(r"^def (\w+)\(folder\):(  # nightly)?$", path.read_text(), re.MULTILINE)
]
"""Functions of a folder alone, found without an import of their modules, which takes long."""
CLAIMS = [claim for claim, is_nightly in _FOUND if not is_nightly]
NIGHTLY = [claim for claim, is_nightly in _FOUND if is_nightly]
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
