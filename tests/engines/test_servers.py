"""Several servers as one engine: played by objects that die, come back and refuse."""

import logging
from types import SimpleNamespace

import pytest

from trl_qarl.engines import servers
from trl_qarl.engines.http_session import ServerLost, server_urls
from trl_qarl.engines.servers import Servers
from trl_qarl.wire.protocol import PublishError


class PlayedEngine:
    """A `ServerEngine` and its client."""

    works_meanwhile = True

    def __init__(self, name):
        self.base_url, self.client, self.channel = f"http://{name}", self, SimpleNamespace(connect=lambda: None)
        self.name, self.is_alive, self.is_refused, self.settings = name, True, False, {"dtype": "x"}
        self.instance = self.num_starts = 0
        self.has_session, self.version, self.chunks, self.asked = True, None, [], []

    def ask(self):
        if not (self.is_alive and self.has_session):
            raise ServerLost(f"{self.name} does not answer")
        if self.is_refused:
            raise PublishError("spoiled")

    def restart(self):
        self.is_alive, self.num_starts, self.version = True, self.num_starts + 1, None

    def reconnect(self, timeout):
        if not self.is_alive:
            raise ServerLost(f"No vLLM server at {self.base_url}")
        self.has_session, self.instance = True, self.num_starts
        return True

    def close_session(self):
        self.has_session = False

    def describe(self):
        self.ask()
        return self.settings | {"replicas": 1, "device": self.name}

    def begin(self):
        self.ask()
        self.chunks = []
        return [self.name]

    def send(self, tensors):
        self.ask()
        self.chunks.append(tensors)

    def finish(self, fingerprints, weight_version):
        self.ask()
        self.version = weight_version

    def weight_version(self):
        self.ask()
        return self.version

    def score(self, token_ids, pictures=()):
        self.ask()
        return [float(len(self.chunks))]

    def generate(self, prompts, pictures=None, n=1, **sampling):
        self.ask()
        self.asked.append((prompts, pictures))
        tokens = [[*prompt, number] for prompt in prompts for number in range(n)]
        return {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": None}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(servers, "REJOIN_SECONDS", 0.2)
    engine = Servers([PlayedEngine("a"), PlayedEngine("b"), PlayedEngine("c")])
    engine.describe()
    publish(engine, "1")
    return engine


def publish(engine, version):
    lost = engine.begin()
    engine.send([])
    engine.finish({}, version)
    return lost


PROMPTS = [[number] for number in range(7)]


def assert_drawn(engine):
    answer = engine.generate(PROMPTS, n=2, temperature=1.0)
    assert answer["prompt_ids"] == PROMPTS and answer["logprobs"] is None
    assert answer["completion_ids"] == [[*prompt, number] for prompt in PROMPTS for number in (0, 1)]


def test_addresses_may_be_a_list_or_a_text():
    assert server_urls("http://a:1, http://b:2 http://c:3") == ["http://a:1", "http://b:2", "http://c:3"]
    assert server_urls(["http://a:1/", "http://b:2/v1"]) == ["http://a:1", "http://b:2"] and server_urls(None) == []


def test_prompts_are_dealt_in_turn_and_put_back_in_order(engine):
    assert engine.describe()["replicas"] == 3
    assert_drawn(engine)
    assert [server.asked for server in engine.engines] == [[(PROMPTS[i::3], None)] for i in range(3)]
    engine.generate([[1], [2]], [["picture"], None])
    assert [server.asked[1:] for server in engine.engines] == [[([[1]], [["picture"]])], [([[2]], [None])], []]


def test_every_server_gets_every_weight_sync(engine):
    assert publish(engine, "2") == ["a", "b", "c"]
    assert engine.weight_version() == "2" and engine.score([1, 2]) == [1.0] * 3
    engine.engines[1].version = "theirs"
    assert engine.weight_version() == "2, theirs"


def test_the_others_draw_what_a_lost_server_was_asked_for(engine, caplog):
    engine.engines[1].is_alive = False
    for _ in range(2):
        assert_drawn(engine)
    assert [len(server.asked) for server in engine.engines] == [3, 0, 3]
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "http://b is left out" in warning.message and "2 of 3 servers are left. b does not" in warning.message


def test_a_lost_server_returns_at_a_weight_sync(engine, caplog):
    lost = engine.engines[1]
    lost.is_alive = False
    assert not engine.rejoin() and publish(engine, "2") == ["a", "c"]
    assert not engine.rejoin() and not lost.has_session
    lost.restart()
    assert_drawn(engine)
    assert lost.asked == []
    assert engine.rejoin() and publish(engine, "3") == ["a", "b", "c"] and lost.version == "3"
    assert not engine.rejoin()
    assert_drawn(engine)
    assert len(lost.asked) == 1 and "http://b takes part again" in caplog.text


def test_a_server_that_was_restarted_otherwise_stays_out(engine, caplog):
    other = engine.engines[2]
    other.is_alive = False
    publish(engine, "2")
    other.restart()
    other.settings = {"dtype": "y"}
    assert not engine.rejoin() and not other.has_session
    other.has_session = True
    assert "http://c differs from the first one in: dtype" in caplog.text
    with pytest.raises(ValueError, match="http://c differs"):
        Servers([PlayedEngine("a"), other]).describe()


def test_no_server_left_is_an_error_that_names_each(engine):
    for server in engine.engines:
        server.is_alive = False
    with pytest.raises(ServerLost, match=r"(?s)None of the 3 .*a does not.*b does not.*c does not"):
        engine.generate(PROMPTS)
    with pytest.raises(ServerLost, match="None of the 3"):
        engine.reconnect(0.0)
    engine.engines[2].restart()
    assert engine.reconnect(5.0) and engine.present == engine.engines[2:]
    assert not engine.reconnect(5.0)


def test_refused_weights_lose_no_server_and_raise(engine):
    engine.engines[1].is_refused = True
    with pytest.raises(PublishError, match="The server at http://b: spoiled"):
        publish(engine, "2")
    assert engine.present == engine.engines
    assert [server.version for server in engine.engines] == ["1"] * 3


def test_a_share_with_other_rows_is_refused(engine):
    generate = engine.engines[0].generate
    engine.engines[0].generate = lambda *args, **kwargs: generate(*args, n=3)
    with pytest.raises(ValueError, match="9 `completion_ids` in place of 6"):
        engine.generate(PROMPTS, n=2)
