"""Environment of every test process, set before anything imports torch or transformers."""

import gc
import os
import sys
import tempfile
from importlib.util import find_spec

import pytest


# torchvision, which some processors of pictures need: .ci/setup has put one there that imports beside a CPU build
# of torch.
sys.path.append(os.path.join(sys.prefix, "pictures"))

# As the Makefile does, however tests are started: every process of theirs would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# One thread per process: xdist runs several, and sums come out in the same order on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
# accelerate imports DeepSpeed where it is installed, which prints its findings unless this is set.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Every file of a checkpoint waits until it is on disk, and in memory does not. Containers may have little of it.
MEMORY = "/dev/shm"
if os.path.ismount(MEMORY) and os.access(MEMORY, os.W_OK):
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize > 2**32 and not found.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
# No test needs a network, and none reports to a tracker.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "disabled"


def pytest_configure(config):
    from testing_utils import parse_metadata_once

    parse_metadata_once()
    # One for all workers, which find it by their environment.
    if not hasattr(config, "workerinput"):
        from testing_utils.warm import FOLDER, Warm

        folder = tempfile.TemporaryDirectory(prefix="warm-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        config.add_cleanup(folder.cleanup)
        os.environ[FOLDER] = folder.name
        first = Warm(folder.name)
        first.open()
        config.add_cleanup(first.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    from testing_utils import importing

    with importing():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """
    Without vLLM its tests are skipped. One worker runs all tests of a file, which imports and prepares once what they
    share; groups that have a name stay. These take longest and come first, so that no worker is alone at the end.
    """
    has_vllm = find_spec("vllm") is not None
    for item in items:
        if not has_vllm and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip("needs vLLM"))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args[0] == item.path.stem)


@pytest.fixture(scope="module", autouse=True)
def keep_what_is_imported():
    """The collection at the end of each training skips the objects of imported modules."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    # Bindings complain of what is never collected.
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from testing_utils import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def masters(tmp_path_factory):
    from testing_utils import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("masters"))


@pytest.fixture(scope="module")
def export(masters, tmp_path_factory):
    """A low-bit export of `masters`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qarl import export_checkpoint, prepare_model

    model, folder = AutoModelForCausalLM.from_pretrained(masters), tmp_path_factory.mktemp("export") / "w4a16"
    prepare_model(model, "w4a16", scale_dtype=torch.float32)
    return str(export_checkpoint(model, folder, AutoTokenizer.from_pretrained(masters), torch.float32))


@pytest.fixture(scope="module")
def quick_engines():
    """Engines in this process start in a third of the time, until the end of the file."""
    pytest.importorskip("vllm")
    from testing_utils import start_engines_quickly

    with pytest.MonkeyPatch.context() as patch:
        start_engines_quickly(patch)
        yield


@pytest.fixture
def no_groups():
    """Ends the process groups of an earlier engine in this process."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="session")
def warm():
    """The processes from which commands and servers are forked."""
    from testing_utils.warm import FOLDER, Warm

    return Warm(os.environ[FOLDER])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hub, which this process takes for the Hub."""
    from testing_utils.hub_stand_in import StandInHub, use

    with StandInHub() as server:
        use(server, monkeypatch, tmp_path / "hub-home")
        yield server


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory):
    from testing_utils import make_tiny_dataset

    return make_tiny_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def train_argv(tiny_model, tiny_dataset, tmp_path):
    """Options of a run of two steps on the tiny model, without the command's name."""
    options = {
        "model_name_or_path": tiny_model,
        "dataset_name": tiny_dataset,
        "reward_funcs": "testing_utils.count_digits",
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": True,
    }
    return [token for name, value in options.items() for token in (f"--{name}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def servers_compile_nothing():
    """vLLM's sampler is compiled in each process that has one, for seconds; what it computes stays the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield


@pytest.fixture
def make_played_trainer(tmp_path, monkeypatch):
    """Makes trainers whose servers are objects."""
    from testing_utils.played_server import play_servers

    return play_servers(tmp_path, monkeypatch)
