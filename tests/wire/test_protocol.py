"""Replies of a server's workers."""

import pytest

from trl_qarl.wire.protocol import PublishError, values_of


def reply(value=None, call="7", replica=0, **fields):
    return {"call": call, "replica": replica} | (fields or {"value": value})


def test_values_come_in_the_order_of_the_workers():
    assert values_of([reply([1]), reply(None, replica=1)], "7") == [[1], None]


def test_each_refusal_is_named_once_with_its_replica():
    with pytest.raises(PublishError, match="^lost$"):
        values_of([reply(refused="lost"), reply(refused="lost"), reply()], "7")
    with pytest.raises(PublishError, match="^Replica 1 of 2: lost$"):
        values_of([reply(), reply(refused="lost", replica=1)], "7")


@pytest.mark.parametrize("late", [reply(call="6"), {"value": None}, None, "text"], ids=str)
def test_a_reply_to_another_call_is_refused(late):
    with pytest.raises(PublishError, match="earlier call.*Start the server again"):
        values_of([reply(), late], "7")
