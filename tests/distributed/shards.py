"""
Which claims about several processes hold, of FSDP2 and DeepSpeed. Each rank writes what it found; run by test_shards.py.

`python shards.py FOLDER [CLAIM ...]` checks some of them, in a folder with the models that test_shards.py makes.
"""

import datetime
import json
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from sharded_checkpoints import (
    a_killed_process_leaves_a_checkpoint,
    a_run_goes_on_from_its_checkpoint,
    one_process_goes_on_from_a_checkpoint_of_two,
    two_processes_go_on_from_a_checkpoint_of_one,
)
from sharded_codes import (
    codes_are_those_of_one_process,
    one_process_gathers_codes_and_scales,
    training_equals_one_process,
    writes_are_seen_without_a_step,
)
from sharded_pictures import (
    pictures_are_shown_to_an_engine_in_every_process,
    pictures_train_what_they_train_with_whole_masters,
    zero_trains_pictures,
)
from sharded_trainers import (
    a_mixture_trains_what_it_trains_with_whole_masters,
    a_reference_is_low_bit_and_sharded_too,
    a_server_is_filled_and_filled_again,
    a_trainer_trains_what_it_trains_with_whole_masters,
    an_adapter_trains_what_it_trains_beside_a_whole_base,
    colocated_engines_are_filled_by_every_process,
    engine_numerics_beside_an_adapter_or_a_reference,
    engine_numerics_train_what_they_train_with_whole_masters,
    operations_are_put_into_sharded_modules,
    precisions_in_turn_train_what_they_train_with_whole_masters,
    processes_that_disagree_are_told_so,
    the_peak_of_fsdp2_is_what_was_calculated,
    torchao_steps_in_4_bits,
)
from train_ddp import fork_ranks
from zero import (
    zero_fills_colocated_engines,
    zero_leaves_a_checkpoint_when_a_process_is_killed,
    zero_resumes_its_own_checkpoints_alone,
    zero_trains_an_adapter_a_reference_and_engine_numerics,
    zero_trains_what_it_trains_with_whole_state,
)


CLAIMS = [
    codes_are_those_of_one_process,
    one_process_gathers_codes_and_scales,
    writes_are_seen_without_a_step,
    training_equals_one_process,
    a_trainer_trains_what_it_trains_with_whole_masters,
    a_mixture_trains_what_it_trains_with_whole_masters,
    an_adapter_trains_what_it_trains_beside_a_whole_base,
    engine_numerics_train_what_they_train_with_whole_masters,
    engine_numerics_beside_an_adapter_or_a_reference,
    operations_are_put_into_sharded_modules,
    precisions_in_turn_train_what_they_train_with_whole_masters,
    a_server_is_filled_and_filled_again,
    a_reference_is_low_bit_and_sharded_too,
    a_run_goes_on_from_its_checkpoint,
    the_peak_of_fsdp2_is_what_was_calculated,
    torchao_steps_in_4_bits,
    processes_that_disagree_are_told_so,
    zero_trains_what_it_trains_with_whole_state,
    zero_trains_an_adapter_a_reference_and_engine_numerics,
    zero_resumes_its_own_checkpoints_alone,
    colocated_engines_are_filled_by_every_process,
    zero_fills_colocated_engines,
    pictures_train_what_they_train_with_whole_masters,
    zero_trains_pictures,
    pictures_are_shown_to_an_engine_in_every_process,
]
LAUNCHES = [
    (2, CLAIMS),
    (1, [one_process_goes_on_from_a_checkpoint_of_two, zero_resumes_its_own_checkpoints_alone]),
    (2, [two_processes_go_on_from_a_checkpoint_of_one]),
]


def run(path, claims):
    """Check claims as one of the processes of a launch, and write what this rank says of each."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    check(claims, path.parent, dist.get_rank(), path.with_name(f"{path.name}rank{dist.get_rank()}.json"))


def check(claims, folder, rank, path):
    found = {}
    for claim in claims:
        start = time.process_time()
        try:
            claim(folder)
            found[claim.__name__] = "holds"
        except Exception:
            found[claim.__name__] = traceback.format_exc()
        print(claim.__name__, rank, f"{time.process_time() - start:.1f} s", found[claim.__name__], flush=True)
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for index, (count, claims) in enumerate(LAUNCHES):
        asked = [claim for claim in claims if not names or claim.__name__ in names]
        if asked:
            fork_ranks(count, run, folder / f"launch{index}", asked)
    for claim in (a_killed_process_leaves_a_checkpoint, zero_leaves_a_checkpoint_when_a_process_is_killed):
        if not names or claim.__name__ in names:
            check([claim], folder, 0, folder / f"{claim.__name__}.json")
