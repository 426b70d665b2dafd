"""Which replica gets a prompt: affinity by prefix, bounded by load; what that is worth with a real cache."""

import json
import random
from typing import Any

import pytest

from mtp_jax.cluster.on_ray import prefixes
from mtp_jax.cluster.on_ray.prefixes import Prefixes, digests
from mtp_jax.engine.pages import PagePool, extend_digests

A, B = "A long system prompt about cooking. " * 20, "Quite another one, about boats. " * 20


def body(**fields):
    return json.dumps(fields).encode()


def test_prompts_that_begin_the_same_share_digests():
    one, two, other = (digests(body(prompt=p)) for p in (A + "x" * 300, A + "y" * 300, B + "x" * 300))
    assert len(one) == (len(A) + 300) // 256
    shared = len(A) // 256
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two)
    assert not set(one) & set(other)


def test_a_conversation_that_goes_on_shares_what_went_before():
    said = [{"role": "user", "content": A}]
    more = [*said, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    before, after = digests(body(messages=said)), digests(body(model="m", messages=more, max_tokens=3))
    assert after[: len(before)] == before
    assert digests(body(messages=said, system=B))[0] != before[0]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[1]", b"3", b"\xff", b"{}", b"[" * 100_000),
        *(body(prompt=""), body(prompt=None), body(messages=[]), body(prompt="short")),
    ],
)
def test_what_has_no_prompt_has_no_digest(data):
    assert digests(data) == ()


def test_text_that_no_server_takes_has_none_and_lists_of_tokens_have_digests():
    assert digests(body(prompt="\udcff" * 512)) == ()
    assert digests(body(prompt=list(range(1000))))[:3] == digests(body(prompt=list(range(2000))))[:3]


def test_a_very_long_prompt_has_a_bounded_number(monkeypatch):
    """Half a MiB of a body is parsed at most, wherever that ends."""
    sizes, parse = [], prefixes.from_json

    def counting(data: bytes, **options: Any) -> Any:
        sizes.append(len(data))
        return parse(data, **options)

    monkeypatch.setattr(prefixes, "from_json", counting)
    assert len(digests(body(prompt="x" * 2_000_000))) == 1024
    said = [{"role": "user", "content": f"\u20ac {i}"} for i in range(150_000)]
    for shift in range(12):
        found = digests(body(pad="x" * shift, messages=said))
        assert found == digests(body(messages=said))[: len(found)]
        assert len(found) > 500
    assert max(sizes) == 2**19


def test_a_prefix_stays_where_it_went():
    routes, a, b = Prefixes[str](slack=8), digests(body(prompt=A)), digests(body(prompt=B))
    assert routes.rank("1", a, "xy")[0] == "x"
    assert routes.rank("2", b, "xy")[0] == "y"
    for name in "1", "2":
        routes.ended(name)
    for name in range(10):
        assert routes.rank(f"a{name}", (*a, b"tail"), "xy") == ["x", "y"]
        routes.ended(f"a{name}")
        assert routes.rank(f"b{name}", b, "xy") == ["y", "x"]
        routes.ended(f"b{name}")


def test_requests_without_a_prompt_go_round():
    routes = Prefixes[str](slack=8)
    got = []
    for name in range(6):
        got.append(routes.rank(f"{name}", (), "xyz")[0])
        routes.ended(f"{name}")
    assert got == ["x", "y", "z"] * 2


def test_a_replica_that_is_too_busy_does_not_get_the_prefix():
    routes, a = Prefixes[str](slack=3), digests(body(prompt=A))
    got = [routes.rank(f"{name}", a, "xy")[0] for name in range(5)]
    assert got == ["x", "x", "x", "x", "y"]
    assert Prefixes[str](slack=0).rank("1", a, "xy") == ["x", "y"]


def test_the_replica_that_took_it_counts_not_the_first_choice():
    routes, a = Prefixes[str](slack=8), digests(body(prompt=A))
    assert routes.rank("1", a, "xy")[0] == "x"
    routes.sent("1", a, "y")  # x was full
    assert routes.rank("2", (), "xy")[0] == "x"  # y is busier
    assert routes.rank("3", a, "xy")[0] == "y"  # and knows the prompt
    for name in ("1", "2", "3", "3", "unknown"):
        routes.ended(name)
    assert not routes._load
    assert not routes._at


def test_a_replica_that_is_gone_is_forgotten():
    routes, a = Prefixes[str](slack=8), digests(body(prompt=A))
    assert routes.rank("1", a, "xy")[0] == "x"
    routes.ended("1")
    assert routes.rank("2", a, "yz")[0] == "y"
    assert routes.rank("3", a, ()) == []
    assert routes.rank("4", a, "yz")[0] == "y"
    assert "x" not in routes._turns


def test_the_least_recently_used_are_forgotten_first():
    routes = Prefixes[str](slack=8, remembered=2)
    for name, digest in (("1", b"1"), ("2", b"2"), ("3", b"1"), ("4", b"3")):
        routes.rank(name, [digest], "xy")
    assert [*routes._where] == [b"1", b"3"]


PAGE = 16


def read(pool: PagePool, tokens: list[int]) -> int:
    """Tokens of a prompt that are in a replica's cache; afterwards all its full pages are."""
    names: list[bytes] = []
    extend_digests(names, "", tokens, PAGE)
    found = pool.match(names)
    pool.share(found)
    new = pool.allocate(len(names) - len(found))
    assert new is not None
    for page, name in zip(new, names[len(found) :], strict=True):
        pool.register(page, name)
    pool.release([*found, *new])
    return len(found) * PAGE


def conversations(by_prefix: bool) -> tuple[float, float]:
    """(share of prompt tokens found in the caches, the busier replica's share of the requests).

    24 conversations of 20 turns over two replicas, each of whose caches holds half of them.
    """
    rng, pools, routes = random.Random(7), [PagePool(180), PagePool(180)], Prefixes[int](slack=8)
    talks = [[rng.randrange(1000) for _ in range(128)] for _ in range(24)]
    found, total, requests = 0, 0, [0, 0]
    turns = (talk for _ in range(20) for talk in rng.sample(talks, len(talks)))
    for number, talk in enumerate(turns):
        prefixes = digests(body(prompt=talk)) if by_prefix else ()
        replica = routes.rank(f"{number}", prefixes, range(2))[0]
        routes.ended(f"{number - 4}")  # four are under way
        found, total = found + read(pools[replica], talk), total + len(talk)
        requests[replica] += 1
        if len(talk) < 240:
            talk += [rng.randrange(1000) for _ in range(8)]
    return found / total, max(requests) / sum(requests)


def test_routing_by_prefix_doubles_the_hits_of_a_real_cache():
    with_prefixes, busier = conversations(True)
    evenly, _ = conversations(False)
    assert with_prefixes > 2 * evenly
    assert with_prefixes > 0.8
    assert busier < 0.6
