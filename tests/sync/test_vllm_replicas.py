"""A server with two replicas or two ranks of vLLM's own: what is sent reaches both, and both are heard."""

import contextlib
import logging
import time
from types import SimpleNamespace

import pytest
import torch

from testing_utils import count_digits, logged, make_tiny_model, make_vllm_trainer
from testing_utils.web_servers import complete, wait_until
from trl_qarl import prepare_model
from trl_qarl.engines.http_session import ServerLost
from trl_qarl.engines.server_command import build_server_command
from trl_qarl.engines.server_process import ServerProcess, free_port
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.wire.protocol import WORKER_EXTENSION, PublishError


faulty_replica = pytest.importorskip("testing_utils.faulty_replica", reason="needs vLLM", exc_type=ModuleNotFoundError)
FAULT_FILE, TENSOR = faulty_replica.FAULT_FILE, faulty_replica.TENSOR
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("warm_servers")]


@pytest.fixture(scope="module")
def server(tmp_path_factory, warm):
    with serving(tmp_path_factory.mktemp("replicas"), warm, "--data-parallel-size") as server:
        yield server


@contextlib.contextmanager
def serving(folder, warm, by):
    """A server of two workers."""
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(folder, "qwen2")
    # Half of a row holds whole groups.
    prepare_model(model := AutoModelForCausalLM.from_pretrained(path), get_scheme("w4a16", 64))
    options = ["--max-model-len", "128", by, "2"]
    port, on_cpu = free_port(), True
    argv, environment = build_server_command(
        EngineSpec.of(model, torch.float32), port=port, on_cpu=on_cpu, vllm_args=options
    )
    argv[argv.index(WORKER_EXTENSION)] = "testing_utils.faulty_replica.FaultyReplica"
    environment |= {FAULT_FILE: str(folder / "fault"), "VLLM_LOGGING_LEVEL": "WARNING"}
    with pytest.MonkeyPatch.context() as patch:
        warm.serve(patch, in_one_process=False)
        process, url = ServerProcess(argv, environment, folder / "server.log"), f"http://127.0.0.1:{port}"
        (folder / "token").write_text(process.token)
        (folder / "token").chmod(0o600)
        process.start()
        process.wait(url, 900)
        yield SimpleNamespace(process=process, url=url, token=str(folder / "token"), fault=folder / "fault")
        process.stop()


@pytest.fixture
def make_trainer(server, tmp_path):
    with trainers_of(server, tmp_path) as make:
        yield make


@contextlib.contextmanager
def trainers_of(server, folder):
    trainers = []

    def make(**arguments):
        arguments = {
            "scheme": "w4a16",
            "group_size": 64,
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_token_file": server.token,
            "vllm_server_timeout": 60,
            # Some codes change in a step, not all.
            "learning_rate": 1e-5,
        } | arguments
        trainers.append(make_vllm_trainer(folder, "qwen2", **arguments))
        return trainers[-1]

    yield make
    server.fault.unlink(missing_ok=True)
    for trainer in trainers:
        trainer.vllm_generation.vllm_client.close_session()


def status_of(server, replica):
    """Status of a replica that is asked for completions."""
    return complete(server.url, headers={"X-data-parallel-rank": str(replica)}).status_code


def workers(trainer, method):
    return trainer.vllm_generation.vllm_client.call_workers(method)


@pytest.mark.parametrize("ahead", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_weights_reach_both_replicas(server, make_trainer, ahead):
    trainer = make_trainer(rollout_ahead=ahead)
    assert trainer.vllm_generation.description["replicas"] == 2
    scored = []
    transport = trainer.vllm_generation.publisher.engine
    score = transport.score
    transport.score = lambda *asked: scored.append(score(*asked)) or scored[-1]
    # As many batches, of which the second is drawn by the weights of the first, and the third by others.
    trainer.args.max_steps += 2 * ahead
    trainer.train()
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
    assert logged(trainer, "rollout/age_updates") == ([0, 2, 2] if ahead else [])
    assert [worker["replica"] for worker in workers(trainer, "qarl_describe")] == [0, 1]
    for values in scored:
        half = len(values) // 2
        assert half > 5 and values[:half] == values[half:]
    assert [status_of(server, replica) for replica in (0, 1)] == [200, 200]


def test_a_wrong_replica_is_named_and_none_generates(server, make_trainer):
    publisher = make_trainer().vllm_generation.publisher
    server.fault.write_text("spoiled during 1")
    with pytest.raises(PublishError, match=f"(?s)Replica 1 of 2: .*{TENSOR}"):
        publisher.publish("1")
    assert [status_of(server, replica) for replica in (0, 1)] == [503, 503]
    server.fault.unlink()
    publisher.publish("2")
    assert [status_of(server, replica) for replica in (0, 1)] == [200, 200]


def test_what_one_replica_has_lost_is_sent_again(server, make_trainer, caplog):
    publisher = make_trainer().vllm_generation.publisher
    publisher.publish("1")
    server.fault.write_text("spoiled before 1")
    with caplog.at_level(logging.WARNING):
        assert publisher.publish("2")["publish/tensors"] == 1
    assert "Sent again: model.norm" in caplog.text


def test_a_server_that_lost_a_replica_starts_again(server, make_trainer):
    """The last test. vLLM ends the whole server, although the trainer holds its session and waits for an answer."""
    deaths = []

    def kill_one(completions, **kwargs):
        if not deaths:
            server.fault.write_text("dies 1")
            start = time.monotonic()
            with pytest.raises((PublishError, ServerLost)) as death:
                workers(trainer, "qarl_clear_cache")
            deaths.append(str(death.value))
            server.fault.unlink()
            wait_until(trainer.vllm_generation.vllm_client.has_lost_session, 30)
            wait_until(lambda: not server.process.is_running, 60)
            assert time.monotonic() - start < 60
            server.process.start()
            server.process.wait(server.url, 900)
        return count_digits(completions)

    trainer = make_trainer()
    trainer.reward_funcs = [kill_one]
    trainer.train()
    assert len(deaths) == 1 and trainer.state.global_step == 4
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
    first, again = logged(trainer, "publish/megabytes")
    assert first == again


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, warm):
    with serving(tmp_path_factory.mktemp("ranks"), warm, "--tensor-parallel-size") as server:
        yield server


def test_every_rank_of_a_tensor_parallel_engine_is_audited(tmp_path, two_ranks):
    server = two_ranks
    with trainers_of(server, tmp_path) as make:
        trainer = make()
        trainer.train()
        assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
        everything, _ = logged(trainer, "publish/megabytes")
        publisher = trainer.vllm_generation.publisher
        publisher.publish("trained")
        server.fault.write_text("spoiled before 1")
        assert publisher.publish("lost")["publish/tensors"] == 1
        server.fault.write_text("spoiled during 1")
        with pytest.raises(PublishError, match=f"(?s)not the learner's on rank 1 of 2:.*{TENSOR}"):
            publisher.publish("refused")
        assert status_of(server, 0) == 503
        server.fault.unlink()
        assert publisher.publish("healed")["publish/megabytes"] == everything
        assert status_of(server, 0) == 200


@pytest.mark.parametrize("refusals", [(0, 1), (1, 0), ("everywhere", 1)], ids=str)
def test_a_refusal_hides_no_later_refusal(tmp_path, two_ranks, refusals):
    """vLLM raises at the first rank that fails and leaves the other replies queued for the next call (vllm#57846)."""
    server = two_ranks
    with trainers_of(server, tmp_path) as make:
        publisher = make().vllm_generation.publisher
        for refusal in refusals:
            publisher.publish("good")
            server.fault.write_text(f"spoiled during {refusal}")
            with pytest.raises(PublishError, match=f"rank {0 if refusal == 'everywhere' else refusal} of 2"):
                publisher.publish("refused")
            assert status_of(server, 0) == 503
            server.fault.unlink()
        publisher.publish("good")
        assert status_of(server, 0) == 200
