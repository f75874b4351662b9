"""
Scenarios of the fault campaign, in families named as in `docs/reliability.md`.

A scenario is a dictionary:

| key | what |
|---|---|
| `name` | unique |
| `faults` | what the server does, see [`stand_in`] |
| `at`, `action` | an event of the trainer's second step, and what happens there, see [`campaign`] |
| `step` | which step instead, counted from 0 |
| `tear` | a moment of the second step's save at which the trainer is killed, see [`TEARS`] |
| `overwrites` | whether that save is of a folder that holds a complete checkpoint |
| `again` | how often the run is resumed after its end |
| `schedule` | of the learning rate, `"linear"` unless told |
| `deaths` | how often the server dies while it starts again |
| `server` | `"child"` of the trainer, the default, or `"apart"`; `"back"` is apart, and started again when it ends |
| `ranks` | 2 for two processes |
| `timeout` | the trainer's `vllm_server_timeout` |
| `again` | whether the trainer, when its engine is lost, trains again in the same process |
| `epochs` | whether there are three epochs of four updates, on two generation batches each, see [`num_steps`] |
| `shuffled` | whether prompts come in another order in each epoch, as they do unless told |
| `file`, `share` | the file of the last checkpoint that is cut, and how much of it is left |
| `ahead` | 1 if generation batches are drawn ahead |
| `expect` | how the first run ends, see [`EXPECTATIONS`] |
"""

import random

from faults.stand_in import ANSWERS


ENDPOINTS = (
    "/pause",
    "qarl_begin",
    "/start_weight_update",
    "/update_weights",
    "qarl_finish",
    "/reset_prefix_cache",
    "/finish_weight_update",
    "/resume",
    "/weight_info",
    "/v1/completions",
)
"""Requests to a server during training."""

START_ENDPOINTS = ("/health", "/v1/models", "/qarl/state", "/qarl/session", "qarl_describe")
"""Requests before training; some of them are repeated after a restart."""

NUM_STEPS = 3
"""Updates of a run, unless it has several epochs."""

KINDS = ("refuse", "500", "400", "hang", "reset", "die", "garbage", "truncated")
MOMENTS = ("first", "middle", "last")

EXPECTATIONS = {
    "completes": "as if nothing had happened",
    "EngineLost": "with a complete checkpoint of the last step",
    "EngineLost without room": "the checkpoint cannot be written; still that error",
    "starts or refuses": "completes, or ends before the first step",
    "ends": "completes, or ends at any time and in any way",
}


def num_steps(scenario: dict) -> int:
    """Updates of the run."""
    return 12 if scenario.get("epochs") else NUM_STEPS


def scenario(name: str, expect: str = "completes", **fields) -> dict:
    return {"name": name, "expect": expect, **fields}


def fault(endpoint: str, kind: str = "die", call: int | str = "middle", **fields) -> dict:
    return {"endpoint": endpoint, "kind": kind, "call": call, **fields}


def moments_of(number: int) -> tuple[str, ...]:
    """The middle call, and for even numbers the first, for odd ones the last; in their order."""
    return MOMENTS[number % 2 : number % 2 + 2]


def requests(kind: str) -> list[dict]:
    """
    Each endpoint fails in that way, before the request takes effect and, in another step of the same run, after.
    Before, kinds take turns with the first and the last call: each endpoint meets each moment, and each kind does.
    """
    scenarios, turn = [], KINDS.index(kind)
    for number, endpoint in enumerate((*START_ENDPOINTS, *ENDPOINTS)):
        is_start = endpoint in START_ENDPOINTS
        moments = ("first",) if is_start else moments_of(number + turn)
        faults = [fault(endpoint, kind, moment, late=moment == "middle") for moment in moments]
        expect = "starts or refuses" if is_start else "completes"
        scenarios.append(scenario(f"{kind} {endpoint} {' and '.join(moments)}", expect, faults=faults))
    return scenarios


def requests_in_turn() -> list[dict]:
    """Each kind of fault in one run, up to three in a step: one less than a step has attempts."""
    turns = (
        ("refuse", "/resume", 1),
        ("500", "qarl_finish", 1),
        ("400", "/finish_weight_update", 2),
        ("hang", "/v1/completions", 2),
        ("reset", "/weight_info", 2),
        ("die", "/update_weights", 3),
        ("truncated", "/update_weights", 3),
        ("garbage", "qarl_finish", 3),
    )
    faults = [
        fault(endpoint, kind, 1, step=step, late=number % 2 == 1)
        for number, (kind, endpoint, step) in enumerate(turns)
    ]
    return [scenario("each kind in turn", faults=faults)]


def answers() -> list[dict]:
    """Completions that are valid HTTP and make no sense: once, another one in each step, and some of them each
    time."""
    # Each publication asks for log-probs of a fixed text before completions are asked for.
    wrong, names = fault("/v1/completions", "answer", 2), list(ANSWERS)
    scenarios = []
    for start in range(0, len(names), NUM_STEPS):
        few = names[start : start + NUM_STEPS]
        faults = [wrong | {"step": step, "answer": answer} for step, answer in enumerate(few, 1)]
        scenarios.append(scenario("; ".join(few), faults=faults))
    for answer in ("one completion fewer", "token 99999", "log-prob NaN", "log-prob -inf", "no completions"):
        again = wrong | {"answer": answer}
        scenarios.append(scenario(f"{answer}, always", "EngineLost", faults=[again | {"step": 2}, *[again] * 3]))
    return scenarios


def apart() -> list[dict]:
    """A server of its own that dies at a request: for good, or until somebody starts it again."""
    scenarios = []
    for number, endpoint in enumerate(ENDPOINTS):
        for moment in moments_of(number):
            # After the last generation nothing is asked of a server any more.
            faults = [fault(endpoint, call=moment)]
            scenarios.append(scenario(f"gone {endpoint} {moment}", "EngineLost", server="apart", faults=faults))
        scenarios.append(scenario(f"back {endpoint}", server="back", faults=[fault(endpoint)]))
    return scenarios


def recovery() -> list[dict]:
    """
    A second fault while the first is being dealt with, at each request of a recovery. The two first faults and the two
    second ones meet each request, and each other.
    """
    scenarios = []
    for turn, first in enumerate(("/v1/completions", "/update_weights")):
        for number, endpoint in enumerate(("/health", "/qarl/state", "/qarl/session", "qarl_describe", *ENDPOINTS)):
            kind = ("500", "die")[(turn + number) % 2]
            faults = [fault(first), fault(endpoint, kind, 1)]
            scenarios.append(scenario(f"{first} then {endpoint} {kind}", faults=faults))
    return scenarios


def restarts() -> list[dict]:
    """The server dies, and dies again while it starts: once, twice, or as often as it is tried."""
    return [
        scenario(f"{endpoint} and {deaths} deaths", expect, faults=[fault(endpoint)], deaths=deaths)
        for endpoint in ("/update_weights", "/v1/completions", "/weight_info")
        for deaths, expect in ((1, "completes"), (2, "completes"), (100, "EngineLost"))
    ]


def moments() -> list[dict]:
    """The server dies between requests: before a step, in the reward function, after a step, at a checkpoint."""
    # A server that is never back is missed by the next publication.
    return [
        scenario(
            f"server dies at {event}, {deaths} more deaths", expect, at=event, action="kill server", deaths=deaths
        )
        for event in ("step_begin", "reward", "optimizer", "step_end", "save")
        for deaths, expect in ((0, "completes"), (1, "completes"), (100, "EngineLost"))
    ]


def full_disk() -> list[dict]:
    """The transfer directory is full from the start, from the second publication on, or for a moment."""
    scenarios = [scenario("no room at all", "EngineLost", room=100_000)]
    for event in ("step_begin", "reward", "step_end"):
        for ending, expect in (("", "EngineLost"), (" for a moment", "completes")):
            full = {"room": 4_000_000, "at": event, "action": f"fill disk{ending}"}
            scenarios.append(scenario(f"full at {event}{ending}", expect, **full))
    return scenarios


def at_three_events(name: str, expect: str, **fields) -> list[dict]:
    """The scenario at three events, with a server that the trainer starts and one of its own."""
    return [
        scenario(f"{name.format(server)} at {event}", expect, server=server, at=event, **fields)
        for event in ("step_begin", "reward", "step_end")
        for server in ("child", "apart")
    ]


def port_taken() -> list[dict]:
    """The server is killed, and another process takes its port, answers all requests and does not know the secret."""
    taken = {"action": "replace server", "timeout": 600.0, "again": True}
    return at_three_events("a liar in place of a server {}", "EngineLost", **taken)


def transfer_directory() -> list[dict]:
    """Something removes the transfer directory, as what clears shared memory and temporary directories does."""
    name = "the transfer directory of a server {} is removed"
    return at_three_events(name, "completes", action="remove transfer directory")


SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")


def signals(target: str, num_requests: int = 50, num_start: int = 8) -> list[dict]:
    """Signals to trainer or server at 20 random moments: some milliseconds after a random request."""
    draw = random.Random(f"signals to the {target}")
    scenarios = []
    for number in range(20):
        name = SIGNALS[number % len(SIGNALS)]
        call = draw.randint(1 if target == "trainer" else num_start + 1, num_requests)
        after = {"target": target, "signal": name, "seconds": round(draw.uniform(0, 0.06), 3)}
        expect = "completes" if target == "server" or name == "SIGSTOP" else "ends"
        faults = [fault("*", "signal", call, **after)]
        scenarios.append(scenario(f"{name} to the {target}, {number}", expect, faults=faults))
    return scenarios


KILLED = {"action": "kill trainer", "expect": "ends"}
LOST = {"at": "step_end", "action": "kill server", "deaths": 100, "expect": "EngineLost"}
NO_ROOM_WHEN_LOST = LOST | {"action": "kill server and leave no room", "expect": "EngineLost without room"}

TEARS = (
    "half a model",
    "before the optimizer",
    "empty state",
    "half state",
    "after the state",
    "before the batch",
    "after the marker",
    "no room",
)
"""Moments of a save. Nothing, half or all of `trainer_state.json` is written."""


CHECKPOINT_FILES = (
    "trainer_state.json",
    "qarl.json",
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "rollout_state_0.pt",
    "config.json",
    "checkpoint_complete",
)


def torn_checkpoints() -> list[dict]:
    """The trainer is killed, or has no room, while it saves: a new folder, or over a complete checkpoint."""
    scenarios = [
        scenario(f"{tear}{' over a complete one' * overwrites}", "ends", tear=tear, overwrites=overwrites)
        for tear in TEARS
        for overwrites in (False, True)
    ]
    return [*scenarios, scenario("no room when the engine is lost", **NO_ROOM_WHEN_LOST)]


def epochs() -> list[dict]:
    """A run of three epochs ends in each of them: between two, within a generation batch, and after one."""
    ordered, killed = {"epochs": True, "shuffled": False}, KILLED | {"at": "step_begin", "epochs": True}
    return [
        scenario("three epochs, undisturbed", epochs=True),
        scenario("three epochs in one order, undisturbed", **ordered),
        *(
            scenario(f"three epochs, killed before update {step}", step=step, **killed)
            for step in (1, 2, 4, 5, 6, 8, 9, 10)
        ),
        *(
            scenario(f"three epochs in one order, killed before update {step}", step=step, **(killed | ordered))
            for step in (5, 8)
        ),
        *(
            scenario(f"three epochs, the engine is lost after update {step}", step=step, epochs=True, **LOST)
            for step in (3, 5, 9)
        ),
    ]


def damaged_checkpoints() -> list[dict]:
    """The trainer is killed, and a file of its last checkpoint, which was complete, turns out to be cut or empty."""
    damage = {"at": "save", "action": "damage checkpoint"}
    return [
        scenario(f"{file}, {'cut' if share else 'empty'}", "ends", file=file, share=share, **damage)
        for number, file in enumerate(CHECKPOINT_FILES)
        for share in ((0, 0.5) if file == "model.safetensors" else (number % 2 / 2,))
    ]


def resumed_ends(schedule: str) -> list[dict]:
    """A run is resumed after its last update, as launchers do that always resume; killed before it could end, or
    not."""
    again, killed = {"schedule": schedule, "again": 2}, KILLED | {"at": "save"}
    return [
        scenario(f"{schedule}, undisturbed", schedule=schedule),
        scenario(f"{schedule}, completed", **again),
        scenario(f"{schedule}, killed in the middle", **again, **killed),
        scenario(f"{schedule}, killed after its last save", **again, **killed, step=2),
    ]


def two_trainers() -> list[dict]:
    """A second trainer, or a stranger without a session, comes to the server of a trainer at work."""
    rivals = {
        "trainer": "apart",
        "trainer with a server of its own": "child",
        "trainer of one output_dir": "child",
        "stranger": "apart",
    }
    return [
        scenario(f"{rival} at {event}", server=server, at=event, action="wait", rival=rival)
        for event in ("step_begin", "reward", "save")
        for rival, server in rivals.items()
    ]


def two_ranks() -> list[dict]:
    """Two processes share a server: it fails, or one of them does. Neither waits for ever."""
    scenarios = [scenario("two ranks undisturbed")]
    for endpoint in ("/update_weights", "/v1/completions", "/weight_info"):
        scenarios += [
            scenario(f"two ranks die {endpoint}", faults=[fault(endpoint)]),
            scenario(f"two ranks 400 {endpoint}", faults=[fault(endpoint, "400")]),
            scenario(f"two ranks gone {endpoint}", "EngineLost", faults=[fault(endpoint)], deaths=100),
        ]
    for action in ("raise", "kill trainer"):
        for rank in (0, 1):
            scenarios.append(
                scenario(f"{action} on rank {rank} of two", "ends", at="reward", action=action, rank=rank)
            )
    scenarios.append(scenario("two ranks, no room when lost", **NO_ROOM_WHEN_LOST))
    for rank, tear in ((0, "half a model"), (0, "no room"), (1, "before the batch")):
        scenarios.append(scenario(f"two ranks, {tear} on rank {rank}", "ends", tear=tear, rank=rank))
    return [case | {"ranks": 2} for case in scenarios]


def drawn_ahead() -> list[dict]:
    """The server is lost while it draws what the learner does not need yet, or the trainer is while it draws."""
    scenarios = [scenario("ahead, undisturbed")]
    # Of the requests for completions the third and the fifth are of batches that are drawn ahead; each publication
    # asks for one, too.
    for number, kind in enumerate(KINDS):
        failing = fault("/v1/completions", kind, 3 + number % 2 * 2, late=number // 2 % 2 == 1)
        scenarios.append(scenario(f"ahead, {kind} in batch {number % 2 + 1}", faults=[failing]))
    die = fault("/v1/completions", call=3)
    # Once more, while the weights that draw it are published again, and while it is drawn again.
    for endpoint in ("qarl_begin", "/update_weights", "/v1/completions", "/weight_info"):
        scenarios.append(scenario(f"ahead, die and {endpoint}", faults=[die, fault(endpoint, call=1)]))
    cut = die | {"kind": "answer", "answer": "a completion cut short"}
    version = fault("/weight_info", call=2)
    scenarios += [
        scenario("ahead, a completion cut short", faults=[cut]),
        scenario("ahead, die before the version is asked for", faults=[version]),
        scenario("ahead, die while weights are published", faults=[fault("/update_weights")]),
        scenario("ahead, back", server="back", faults=[die]),
        scenario("ahead, gone", "EngineLost", server="apart", faults=[die]),
        scenario("ahead, and 100 deaths", "EngineLost", faults=[die], deaths=100),
    ]
    for event in ("step_begin", "reward", "optimizer", "save"):
        scenarios.append(scenario(f"ahead, the trainer is killed at {event}", at=event, **KILLED))
        if event != "save":
            scenarios.append(scenario(f"ahead, the server is killed at {event}", at=event, action="kill server"))
    for tear in ("before the batch", "after the marker"):
        scenarios.append(scenario(f"ahead, torn {tear}", "ends", tear=tear))
    for name in ("SIGTERM", "SIGINT"):
        ending = fault("/v1/completions", "signal", 3, target="trainer", signal=name, seconds=0.01)
        scenarios.append(scenario(f"ahead, {name} to the trainer", "ends", faults=[ending]))
    scenarios = [case | {"ahead": 1} for case in scenarios]
    epochs = {"ahead": 1, "epochs": True}
    scenarios.append(scenario("three epochs, ahead, undisturbed", **epochs))
    for step in (1, 4, 6, 9):
        killed = KILLED | {"at": "step_begin", "step": step}
        scenarios.append(scenario(f"three epochs, ahead, killed before update {step}", **epochs, **killed))
    ranks = {"ahead": 1, "ranks": 2}
    return [
        *scenarios,
        scenario("two ranks, ahead, undisturbed", **ranks),
        scenario("two ranks, ahead, die", faults=[die], **ranks),
        scenario("two ranks, ahead, gone", "EngineLost", faults=[die], deaths=100, **ranks),
        scenario("two ranks, ahead, rank 1 is killed", at="reward", rank=1, **ranks, **KILLED),
    ]


FAMILIES = {
    **{f"requests, {kind}": requests(kind) for kind in KINDS},
    "requests in turn": requests_in_turn(),
    "answers": answers(),
    "recovery": recovery(),
    "restarts": restarts(),
    "moments": moments(),
    "apart": apart(),
    "port taken": port_taken(),
    "full disk": full_disk(),
    "torn checkpoints": torn_checkpoints(),
    "damaged checkpoints": damaged_checkpoints(),
    "epochs": epochs(),
    **{f"resumed ends, {schedule}": resumed_ends(schedule) for schedule in ("linear", "constant")},
    "transfer directory": transfer_directory(),
    "signals to the trainer": signals("trainer"),
    "signals to the server": signals("server"),
    "two trainers": two_trainers(),
    "two ranks": two_ranks(),
    "drawn ahead": drawn_ahead(),
}

# One for each way in which a run goes on, or ends, and the undisturbed ones that these are compared with.
CHOSEN = (
    "each kind in turn",
    "log-prob NaN; log-prob inf; log-prob -inf",
    "no completions, always",
    "/v1/completions then /update_weights die",
    "/weight_info and 100 deaths",
    "server dies at reward, 1 more deaths",
    "gone /update_weights last",
    "back /v1/completions",
    "a liar in place of a server apart at reward",
    "no room at all",
    "full at reward for a moment",
    "half a model over a complete one",
    "no room",
    "no room when the engine is lost",
    "model.safetensors, cut",
    "three epochs, undisturbed",
    "three epochs, killed before update 9",
    "linear, killed after its last save",
    "constant, undisturbed",
    "constant, completed",
    "the transfer directory of a server child is removed at reward",
    "SIGKILL to the trainer, 0",
    "SIGTERM to the trainer, 1",
    "SIGINT to the trainer, 2",
    "SIGSTOP to the server, 3",
    "trainer at save",
    "trainer of one output_dir at step_begin",
    "stranger at reward",
    "ahead, undisturbed",
    "three epochs, ahead, undisturbed",
    "ahead, die in batch 2",
    "ahead, the trainer is killed at reward",
    "two ranks undisturbed",
    "two ranks die /update_weights",
    "two ranks gone /v1/completions",
    "kill trainer on rank 1 of two",
    "two ranks, ahead, undisturbed",
)
"""Scenarios of all families that run every time; the whole families run each night."""
