"""
Checks claims about DDP, FSDP2 and DeepSpeed on several processes. Each rank writes its results; run by test_shards.py.

`python shards.py FOLDER CLAIM ...` checks some of them, in a folder with the models that test_shards.py makes.
"""

import datetime
import importlib
import json
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path


CLAIMS = (
    "codes_are_those_of_one_process",
    "one_process_gathers_codes_and_scales",
    "writes_are_seen_without_a_step",
    "training_equals_one_process",
    "a_trainer_trains_what_it_trains_with_whole_masters",
    "a_mixture_trains_what_it_trains_with_whole_masters",
    "an_adapter_trains_what_it_trains_beside_a_whole_base",
    "precisions_in_turn_train_what_they_train_with_whole_masters",
    "engine_numerics_train_what_they_train_with_whole_masters",
    "operations_are_put_into_sharded_modules",
    "batches_drawn_ahead_train_what_they_train_with_whole_masters",
    "a_reference_is_low_bit_and_sharded_too",
    "a_run_goes_on_from_its_checkpoint",
    "one_process_goes_on_from_a_checkpoint_of_two",
    "two_processes_go_on_from_a_checkpoint_of_one",
    "processes_that_disagree_are_told_so",
    "zero_trains_what_it_trains_with_whole_state",
    "zero_resumes_its_own_checkpoints_alone",
    "colocated_engines_are_filled_by_every_process",
    "zero_fills_colocated_engines",
    "zero_trains_batches_drawn_ahead",
    "processes_train_the_same_weights_and_go_on_from_a_checkpoint",
    "two_processes_train_with_engine_numerics",
    "one_process_trains_with_engine_numerics_what_two_did",
    "two_processes_share_one_server",
    "what_fails_on_one_process_ends_both_with_a_checkpoint",
    "pictures_train_what_they_train_with_whole_masters",
    "processes_that_have_pictures_or_none_are_told_so",
)
NIGHTLY = (
    "zero_trains_pictures",
    "pictures_are_shown_to_an_engine_in_every_process",
    "the_peak_of_fsdp2_is_what_was_calculated",
    "torchao_steps_in_4_bits",
    "engine_numerics_beside_an_adapter_or_a_reference",
    "zero_trains_an_adapter_a_reference_and_engine_numerics",
    "a_killed_process_leaves_a_checkpoint",
    "zero_leaves_a_checkpoint_when_a_process_is_killed",
)
AFTER = {
    "one_process_goes_on_from_a_checkpoint_of_two": ["a_run_goes_on_from_its_checkpoint"],
    "two_processes_go_on_from_a_checkpoint_of_one": [
        "a_run_goes_on_from_its_checkpoint",
        "one_process_goes_on_from_a_checkpoint_of_two",
    ],
    "one_process_trains_with_engine_numerics_what_two_did": ["two_processes_train_with_engine_numerics"],
    "a_killed_process_leaves_a_checkpoint": ["a_run_goes_on_from_its_checkpoint"],
    "zero_resumes_its_own_checkpoints_alone": ["zero_trains_what_it_trains_with_whole_state"],
    "zero_leaves_a_checkpoint_when_a_process_is_killed": ["zero_trains_what_it_trains_with_whole_state"],
}
"""Claims that go on from the files of others."""
ALONE = ("one_process_goes_on_from_a_checkpoint_of_two", "one_process_trains_with_engine_numerics_what_two_did")
BY_ONE = (*ALONE, "zero_resumes_its_own_checkpoints_alone")
MODULES = ("ddp", "fail_ddp", "sharded_checkpoints", "sharded_codes", "sharded_pictures", "sharded_trainers", "zero")


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

    for name in MODULES:
        importlib.import_module(name)
    makes_launches = [name for name in NIGHTLY if "killed" in name]
    last = ["two_processes_go_on_from_a_checkpoint_of_one"]
    first = [name for name in (*CLAIMS, *NIGHTLY) if name not in (*ALONE, *last, *makes_launches)]
    for index, (count, names) in enumerate(((2, first), (1, BY_ONE), (2, last))):
        if names := [name for name in names if name in asked]:
            fork_ranks(count, run, folder / f"launch{index}", names)
    for name in makes_launches:
        if name in asked:
            check([name], folder, 0, folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
