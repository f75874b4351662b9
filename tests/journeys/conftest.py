"""Fixtures of journeys, which [`journeys`] describes."""

import pytest
from journeys import User

from testing_utils.warm import Warm


@pytest.fixture(scope="package")
def warm(tmp_path_factory):
    """The processes that commands, and plain engines, are forked from."""
    folder = tmp_path_factory.mktemp("warm")
    processes = {kind: Warm(kind, folder) for kind in ("engines", "plain")}
    yield processes
    for process in processes.values():
        process.close()


@pytest.fixture
def user(tmp_path, warm, record_property):
    user = User(tmp_path, warm)
    yield user
    user.close()
    record_property("seconds", user.seconds)
    print({name: round(seconds, 1) for name, seconds in user.seconds.items()})
