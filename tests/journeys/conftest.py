"""Fixtures of journeys, which [`journeys`] describes."""

import pytest
from journeys import User


@pytest.fixture
def user(tmp_path, warm, record_property):
    user = User(tmp_path, warm)
    yield user
    user.close()
    record_property("seconds", user.seconds)
    print({name: round(seconds, 1) for name, seconds in user.seconds.items()})
