"""Requests to hosts and their replies: the same classes at both ends, parsed strictly."""

import json

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.wire import VERSION, HostJob, ProcessFile, Reply, Request, decode, encode

JOB = HostJob(name="far", folder="~/.dtrain", runs="runs", rank=1, world_size=2, coordinator="a:8476")
CANARY = "canary-5e60718293"


@pytest.mark.parametrize(
    "message",
    [
        JOB,
        Request(verb="start", job=JOB, recipe="steps: 1\n", environment={"KEY": CANARY}, record="{}"),
        Request(verb="logs", job=JOB, offset=7, follow=True),
        Reply(time=1.5, ready=True, versions={"jax": "0.1"}, problems=("full",), items=(0, 1)),
        ProcessFile(7, None, code=75),
    ],
)
def test_a_message_is_decoded_to_what_was_sent(message: object) -> None:
    line = encode(message)
    assert "\n" not in line
    assert decode(line, type(message)) == message


def changed(**changes: object) -> str:
    return json.dumps(json.loads(encode(Reply(problem="full"))) | changes)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (changed(version=VERSION + 1, dtrain="9.9"), f"9.9 there: versions differ (Reply of version {VERSION + 1}"),
        (changed(type="Answer"), "Answer of version"),
        (changed(value={"problem": "full", "colour": "red"}), "Reply has different keys"),
        (changed(value={"problem": "full"}), "Reply has different keys"),
        (encode(Reply()).replace('"alive": false', '"alive": "no"'), "Reply.alive: "),
    ],
)
def test_other_versions_and_keys_are_refused(line: str, reason: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        decode(line, Reply)
    assert reason in caught.value.message


@pytest.mark.parametrize("line", ["Welcome to dt-w0!", "7", "{}", '{"type": "Reply"}'])
def test_a_login_banner_is_not_parsed_as_a_message(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a message|Expecting"):
        decode(line, Reply)


def test_values_of_secrets_are_neither_shown_nor_quoted() -> None:
    request = Request(verb="start", job=JOB, environment={"KEY": CANARY})
    assert CANARY not in repr(request)
    with pytest.raises(EnvironmentFault) as caught:
        decode(encode(request).replace(f'"{CANARY}"', f'["{CANARY}"]'), Request)
    assert "Request.environment.KEY" in caught.value.message
    assert CANARY not in str(caught.value)
