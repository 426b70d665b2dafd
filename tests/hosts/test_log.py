"""The launch log by itself: who comes together, and who is refused."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.decode.launches import Move
from mtp_jax.errors import ConfigError
from mtp_jax.hosts import leader_log
from mtp_jax.hosts.follower_log import FollowerLog
from mtp_jax.hosts.hello import difference, versions
from mtp_jax.hosts.leader_log import LeaderLog
from mtp_jax.hosts.messages import End
from mtp_jax.hosts.options import Hosts
from mtp_jax.wire.credentials import Credentials
from mtp_jax.wire.tls import TlsFiles
from tests.hosts.helpers import SECRET, Meeting
from tests.hosts.ranks import two_free_ports

PLAIN = b"\0"
FILES = Path(__file__).parents[1] / "tls"

# Joining


@pytest.fixture
def meeting() -> Iterator[Callable[..., Meeting]]:
    made: list[Meeting] = []

    def make(*args: Any, **options: Any) -> Meeting:
        made.append(Meeting(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.leader.close("the test is over")
        each.thread.join(10)


def test_followers_join_in_any_order_and_hear_the_same(meeting):
    group = meeting(hosts=3)
    second, first = group.follower(2), group.follower(1)
    group.joined()
    group.leader.send(Move(2, 1))
    ending = threading.Thread(target=group.leader.finish)
    ending.start()
    for follower in (first, second):
        assert follower.expect(Move) == Move(2, 1)
        assert follower.receive() == End()
        follower.finish()
    ending.join(10)
    assert not ending.is_alive()
    assert group.lost.empty()  # an end that was said is no loss


def test_an_encrypted_log_takes_no_plain_rank(meeting, caplog):
    files = TlsFiles(tls_cert=FILES / "cert.pem", tls_key=FILES / "key.pem", tls_ca=FILES / "cert.pem")
    own = Credentials(SECRET.secret, files.peering())
    group = meeting(own=own)
    with pytest.raises(ConfigError, match=r"rank 1 at 127.*encrypts, this one does not: give --tls-cert"):
        group.follower()
    follower = group.follower(own=own)
    group.joined()
    group.leader.send(Move(2, 1))
    assert follower.expect(Move) == Move(2, 1)
    assert caplog.text.count("this side encrypts, the other does not") == 1
    follower.finish()


def test_the_least_of_all_ranks_numbers(meeting):
    group = meeting(hosts=3)
    second, first = group.follower(2), group.follower(1)
    group.joined()
    for numbers in ((70, 50, 60), (40, 50, 60), (70, 60, 50)):  # rank 0, 1, 2
        with ThreadPoolExecutor(3) as threads:
            logs = group.leader, first, second
            found = threads.map(lambda log, mine: log.least(mine), logs, numbers, timeout=10)
            assert [*found] == [min(numbers)] * 3


def test_garbage_on_the_port_disturbs_nobody(meeting, caplog):
    group = meeting()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100_000, b"", b"\x16\x03\x01" + os.urandom(500)):
        with socket.create_connection(group.hosts.address) as stranger, suppress(OSError):
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    silent = socket.create_connection(group.hosts.address)  # says nothing at all
    follower = group.follower()
    group.joined()
    # The silent one at the end. A connection is closed before its thread has told of it.
    while caplog.text.count("dropped a connection from 127.0.0.1") < 3:
        time.sleep(0.01)
    assert group.lost.empty()
    silent.close()
    follower.finish()


def test_another_secret_ends_that_rank_at_once_and_is_named_at_the_end(meeting, caplog):
    group = meeting(hosts=3, seconds=1)
    second = group.follower(2)
    with pytest.raises(ConfigError, match=r"rank 0 does not take rank 1 at .*another secret"):
        group.follower(own=Credentials(b"the secret of another group"))
    group.thread.join(10)
    assert "wrong secret from 127.0.0.1" in caplog.text
    assert "rank 1 of 3 did not come in 1 s; 127.0.0.1:" in str(group.failed)
    assert "came as rank 1 with another secret; start it with" in str(group.failed)
    second.finish()


def test_a_stranger_with_another_secret_is_forgiven_when_the_rank_comes(meeting, caplog):
    group = meeting(seconds=20)
    with pytest.raises(ConfigError, match="another secret"):
        group.follower(own=Credentials(b"the secret of another group"))
    with socket.create_connection(group.hosts.address) as stranger:  # as a rank that there is not
        stranger.sendall(leader_log.PURPOSE + PLAIN + bytes(32) + leader_log.RANK.pack(7) + bytes(32))
        assert stranger.recv(100, socket.MSG_WAITALL)[-1:] == b"\2"
    follower = group.follower()
    group.joined()
    assert caplog.text.count("wrong secret from 127.0.0.1") == 1
    follower.finish()


def test_one_without_the_secret_does_not_end_the_start(meeting, caplog):
    """However often it says that it is a rank which has not come yet."""
    group = meeting(seconds=60)
    for _ in range(3):
        with socket.create_connection(group.hosts.address) as stranger:
            stranger.sendall(leader_log.PURPOSE + PLAIN + bytes(32) + leader_log.RANK.pack(1) + bytes(32))
            assert stranger.recv(100, socket.MSG_WAITALL)[-1:] == b"\2"
    assert group.thread.is_alive()
    follower = group.follower()
    group.joined()
    assert caplog.text.count("wrong secret from 127.0.0.1") == 1
    follower.finish()


def test_connections_that_say_nothing_keep_no_rank_out(meeting):
    group = meeting(hosts=3, seconds=60)
    silent = [socket.create_connection(group.hosts.address) for _ in range(150)]
    first, second = group.follower(1), group.follower(2)
    group.joined()
    assert group.lost.empty()
    for each in (*silent, first._channel, second._channel):
        each.close()


def test_a_rank_that_is_dropped_before_it_has_proved_itself_comes_again(meeting, monkeypatch):
    """As one is that strangers push out: before it is given its rank, then between that and the answer."""
    group, calls, welcome = meeting(seconds=60), [], leader_log.welcome

    def dropping(connection, secret, purpose, size, take):
        calls.append(connection)
        while group.leader._taken:  # the one before it is still being dropped
            time.sleep(0.01)

        def dropped(claim: bytes) -> None:
            if len(calls) == 2:
                take(claim)
            connection.close()

        return welcome(connection, secret, purpose, size, take if len(calls) == 3 else dropped)

    monkeypatch.setattr(leader_log, "welcome", dropping)
    follower = group.follower()
    group.joined()
    assert len(calls) == 3
    assert group.lost.empty()
    follower.finish()


def test_a_rank_comes_once(meeting):
    group = meeting(hosts=3)
    first = group.follower(1)
    with pytest.raises(ConfigError, match=r"does not take rank 1 .*a rank of its own"):
        group.follower(1)
    second = group.follower(2)
    group.joined()
    for each in (first, second):
        each.finish()


def test_a_leader_that_does_not_know_the_secret_is_refused():
    """It sends what a leader sends, and then a proof that it cannot make."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(leader_log.PURPOSE + PLAIN + bytes(32))
                sock.recv(1 << 10)
                sock.sendall(b"\1" + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        hosts = Hosts(2, 1, "127.0.0.1:1", log_port=port, join_seconds=10)
        with pytest.raises(ConfigError, match="the other side does not know the secret"):
            FollowerLog(hosts, SECRET, print)
        thread.join(10)


def test_nobody_there():
    hosts = Hosts(2, 1, f"127.0.0.1:{two_free_ports()}", join_seconds=0.2)
    with pytest.raises(ConfigError, match="rank 0 does not listen at 127"):
        FollowerLog(hosts, SECRET, print)


def test_a_port_that_is_taken_is_refused(meeting):
    group = meeting(seconds=0.1)
    with pytest.raises(ConfigError, match="the launch log cannot have 127"):
        LeaderLog(group.hosts, SECRET, print)


def test_a_difference_ends_the_start_on_both_sides(meeting):
    group = meeting()
    follower = group.follower()
    group.joined()
    refused: list[str] = []

    def compare() -> None:
        with pytest.raises(ConfigError) as caught:
            follower.compare({"jax": "0.10.2", "options": '{"page_size": 64, "dtype": "float32"}'})
        refused.append(str(caught.value))

    thread = threading.Thread(target=compare)
    thread.start()
    with pytest.raises(ConfigError) as caught:
        group.leader.compare({"jax": "0.10.2", "options": '{"page_size": 16, "dtype": "float32"}'})
    thread.join(10)
    words = "rank 1 differs from rank 0 in options: page_size = 64 there, page_size = 16 on rank 0"
    assert str(caught.value).startswith(words)
    assert refused == [str(caught.value)]


def test_a_lost_follower_and_a_lost_leader_are_named(meeting):
    group = meeting()
    follower = group.follower()
    group.joined()
    follower.finish()
    assert group.lost.get(timeout=5).startswith("rank 1 is lost")
    group = meeting()
    follower = group.follower()
    group.joined()
    group.leader.close("out of memory")
    assert group.lost.get(timeout=5) == "rank 0 failed: out of memory"
    follower.finish()


# What is compared, and the options


def test_what_is_compared():
    assert difference(versions(), versions(), 1) is None
    assert "in jax: None there" in str(difference(versions(), {}, 3)) or "Python" in str(
        difference(versions(), {}, 3)
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": 2}, "coordinator = None; expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here"}, "expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here:0"}, "expected HOST:PORT"),
        ({"hosts": 2, "coordinator": "here:65535"}, "give another log_port"),
        ({"hosts": 2, "coordinator": "here:9", "log_port": 9}, "give another log_port"),
        ({"hosts": 2, "rank": 2, "coordinator": "here:9"}, "ranks go from 0 to 1"),
        ({"rank": 1}, "ranks go from 0 to 0"),
    ],
)
def test_options_that_cannot_be(given, words):
    with pytest.raises(ConfigError, match=words):
        Hosts(**given)


def test_the_log_has_the_port_after_the_coordinators():
    assert Hosts(2, 0, "[::1]:9").address == ("::1", 10)
