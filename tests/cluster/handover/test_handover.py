"""Prefill apart from decode: text and acceptance are those of one server, whatever becomes of the pages."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_jax import LLM, AsyncLLM, ConfigError, RequestOutput, SamplingParams
from mtp_jax.api.identity import Identity
from mtp_jax.api.warm_up import WarmUp
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.cluster.handover.handover import Handover
from mtp_jax.cluster.handover.options import HandoverOptions
from mtp_jax.wire.secret import VARIABLE
from tests import tiny_tokenizer, v4
from tests.checkpoint.files import copy_folder
from tests.cluster.handover.proxy import Harm, Proxy, cut, flip, stall
from tests.golden import model_dir
from tests.models import tiny_params

pytestmark = pytest.mark.usefixtures("shared_programs")

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = [(7 * i * i + 3) % 40 + 2 for i in range(60)]  # three whole pages, and twelve tokens
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 96, "page_size": 16, "prefill_chunk": 16}


def load(**config: Any) -> LLM:
    return LLM(model_dir("rigged"), **SIZES, **config)


@pytest.fixture(scope="module")
def prefiller() -> LLM:
    return load(host_cache_gib=0.01)


@pytest.fixture(scope="module")
def decoder() -> LLM:
    return load(host_cache_gib=0.01)


def computed(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """By one server, without any cache of prefixes."""

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(load(prefix_cache=False)) as allm:
            return [await ask(allm, prompt, params) for prompt in prompts]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def alone() -> RequestOutput:
    (output,) = computed([PROMPT], GREEDY)
    assert output.speculation.accepted > 3
    return output


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sixteen characters")


@pytest.fixture(autouse=True)
def _no_further_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that serve anything are enough. Looking for garbage takes longer than these requests."""
    monkeypatch.setattr(WarmUp, "start", lambda self: None)
    monkeypatch.setattr("mtp_jax.api.warm_up.return_free_memory", lambda: None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def as_alone(got: RequestOutput, want: RequestOutput) -> None:
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.speculation.acceptance_length == want.speculation.acceptance_length


async def ask(
    allm: AsyncLLM, prompt: list[int] | None = None, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    return [output async for output in allm.generate(prompt or PROMPT, params, **options)][-1]


class Server(AsyncLLM):
    """An engine that has a role."""

    def __init__(self, llm: LLM, options: HandoverOptions) -> None:
        super().__init__(llm)
        self.handover = Handover(self, options)


@asynccontextmanager
async def apart(
    prefiller: LLM, decoder: LLM, harm: Harm | None = None, **options: Any
) -> AsyncIterator[tuple[Server, Server]]:
    """A server that prefills, and one that decodes, both with empty caches."""
    address = "127.0.0.1", free_port()
    proxy = Proxy(address, harm) if harm else None
    source = f"127.0.0.1:{(proxy.address if proxy else address)[1]}"
    first = HandoverOptions("prefill", peer_address=f"127.0.0.1:{address[1]}")
    second = HandoverOptions("decode", **{"peers": (source,), "peer_seconds": 60.0, **options})
    p, d = Server(prefiller, first), Server(decoder, second)
    async with p, d:
        for allm in (p, d):
            await allm.on_engine(allm.llm.engine.flush_prefix_cache)
        yield p, d
    if proxy:
        proxy.close()
    assert p.error is d.error is None
    assert decoder.engine.stats().pages_used == prefiller.engine.stats().pages_used == 0


def stats(server: Server) -> tuple[float, dict[str, float]]:
    pages, failures = server.handover.counters().values()
    return sum(pages.values()), dict(failures)


def test_a_prompt_is_prefilled_elsewhere(prefiller, decoder, alone):
    async def run() -> None:
        async with apart(prefiller, decoder) as (p, d):
            before = prefiller.engine.stats().prompt_tokens
            got = await ask(d)
            as_alone(got, alone)
            assert got.cached_tokens == 48
            assert (stats(p), stats(d)) == ((3, {}), (3, {}))
            assert prefiller.engine.stats().prompt_tokens - before == 60
            await ask(d)  # it is in the decoder's own cache now
            assert stats(d) == (3, {})

    asyncio.run(run())


def test_only_what_is_missing_is_handed_over(prefiller, decoder, alone):
    async def run() -> None:
        async with apart(prefiller, decoder) as (p, d):
            await ask(d, PROMPT[:20], replace(GREEDY, max_tokens=2))
            assert stats(d) == (1, {})
            as_alone(await ask(d), alone)
            assert stats(d) == (3, {})
            await ask(d, [5, 6, 7])
            assert (stats(p), stats(d)) == ((3, {}), (3, {}))

    asyncio.run(run())


def test_many_at_once_sampled_with_salts(prefiller, decoder):
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
    prompts = [[t, *PROMPT[: 20 + 5 * t]] for t in range(2, 8)]
    wants = computed(prompts, params)

    async def run() -> None:
        async with apart(prefiller, decoder) as (_, d):
            got = await asyncio.gather(*(ask(d, q, params, cache_salt=str(q[0] % 2)) for q in prompts))
            for output, want in zip(got, wants, strict=True):
                as_alone(output, want)
            assert sum(o.speculation.accepted for o in got) > 0
            assert [o.cached_tokens for o in got] == [(len(q) - 1) // 16 * 16 for q in prompts]
            assert stats(d)[1] == {}

    asyncio.run(run())


async def length(prefiller: LLM, decoder: LLM) -> int:
    passed = [0]

    def count(at: int, data: bytes) -> bytes:
        passed[0] = at + len(data)
        return data

    async with apart(prefiller, decoder, count) as (_, d):
        await ask(d)
    return passed[0]


@pytest.mark.parametrize(
    ("harm", "reason", "tokens"),
    [(flip, "damaged", [32]), (cut, "lost", [0, 16, 32]), (stall, "late", [0, 16, 32])],
    ids=["damaged", "lost", "late"],
)
def test_what_does_not_come_whole_is_computed(prefiller, decoder, alone, harm, reason, tokens):
    async def run() -> None:
        at = await length(prefiller, decoder) - 100  # in the third page
        seconds = 2.0 if harm is stall else 60.0
        async with apart(prefiller, decoder, harm(at), peer_seconds=seconds) as (_, d):
            got = await ask(d)
            as_alone(got, alone)
            assert got.cached_tokens in tokens
            assert stats(d)[1] == {reason: 1}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"peers": (f"127.0.0.1:{free_port()}",)}, "unreachable"),
        ({"secret_file": "another"}, "secret"),
    ],
    ids=["unreachable", "secret"],
)
def test_without_a_peer_it_serves_alone(prefiller, decoder, alone, options, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "another"
    secret.write_text("another secret, of a stranger")
    secret.chmod(0o600)

    async def run() -> None:
        async with apart(prefiller, decoder, **options) as (_, d):
            got = await ask(d)
            as_alone(got, alone)
            assert got.cached_tokens == 0
            assert stats(d) == (0, {reason: 1})

    asyncio.run(run())


@pytest.mark.parametrize("change", ["weights", "page size", "dtype", "one bit"])
def test_pages_of_another_kind_are_refused(prefiller, decoder, alone, change, monkeypatch, tmp_path):
    async def run() -> None:
        async with apart(prefiller, decoder) as (p, d):
            if change == "weights":
                monkeypatch.setattr(prefiller.engine, "weight_version", "1")
            elif change == "one bit":
                folder = copy_folder(model_dir("rigged"), tmp_path / "model")
                (path,) = folder.glob("*.safetensors")
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
                monkeypatch.setattr(p.handover, "_weights", Identity([folder]))
            else:
                other: dict[str, Any] = {"page size": {"page_size": 32}, "dtype": {"dtype": "bfloat16"}}
                config = replace(prefiller.engine.config, **other[change])
                monkeypatch.setattr(prefiller.engine, "config", config)
            as_alone(await ask(d), alone)
            assert (stats(p), stats(d)) == ((0, {"config": 1}), (0, {"config": 1}))
            monkeypatch.undo()

    asyncio.run(run())


def test_a_peer_that_refuses_the_prompt(prefiller, decoder, alone):
    async def run() -> None:
        async with apart(prefiller, decoder) as (p, d):
            p._draining = True
            as_alone(await ask(d), alone)
            assert (stats(p), stats(d)) == ((0, {"refused": 1}), (0, {"refused": 1}))

    asyncio.run(run())


def test_pages_that_come_after_a_flush_are_not_taken(prefiller, decoder, alone, monkeypatch):
    """They may be those of weights that were replaced meanwhile."""

    async def run() -> None:
        async with apart(prefiller, decoder) as (_, d):
            assert d.handover.peers
            get = d.handover.peers.fetch

            def late(*args: Any) -> Any:
                pages = get(*args)
                flush = d.on_engine(decoder.engine.flush_prefix_cache)
                asyncio.run_coroutine_threadsafe(flush, loop).result(10)
                return pages

            loop = asyncio.get_running_loop()
            monkeypatch.setattr(d.handover.peers, "fetch", late)
            got = await ask(d)
            as_alone(got, alone)
            assert (got.cached_tokens, stats(d)[0]) == (0, 3)

    asyncio.run(run())


def test_an_abandoned_request_leaves_nothing(prefiller, decoder, alone):
    async def run() -> None:
        async with apart(prefiller, decoder, stall(0), peer_seconds=1.0) as (_, d):
            task = asyncio.create_task(ask(d))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (d.live, d.admission.requests) == (0, 0)
            as_alone(await ask(d), alone)

    asyncio.run(run())


OPTIONS = [
    ({"role": "decode"}, "'decode' takes one or more"),
    ({"role": "prefill", "peers": ("h:1",)}, "'prefill' none"),
    ({"role": "decode", "peers": ("h",)}, "'h' is no address of a peer"),
    ({"role": "decode", "peers": ("h:99999",)}, "is no address of a peer"),
    ({"peers": ("h:1",)}, "are of a role"),
    ({"secret_file": "x"}, "are of a role"),
    ({"tls_cert": "x"}, "are of a role"),
    ({"role": "prefill", "tls_ca": "x"}, "tls_ca = x without tls_cert"),
    ({"role": "both", "peer_seconds": 0}, "peer_seconds = 0; expected"),
]


@pytest.mark.parametrize(("given", "message"), OPTIONS)
def test_options(given, message):
    with pytest.raises(ConfigError, match=message):
        HandoverOptions(**given)


def test_a_role_needs_the_secret(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match="role = 'prefill' needs a secret"):
        HandoverOptions("prefill").credentials()


def test_pages_need_a_place_and_a_port(decoder):
    options = HandoverOptions("decode", peers=("h:1",))
    bare = LLM(model_dir("rigged"), **SIZES)
    with pytest.raises(ConfigError, match="needs host_cache_gib above 0"):
        Handover(AsyncLLM(bare), options)
    with pytest.raises(ConfigError, match="role = 'both' hands nothing over"):
        Handover(AsyncLLM(decoder), HandoverOptions())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot bind to peer_address"):
            Handover(AsyncLLM(decoder), HandoverOptions("prefill", peer_address=where))


@pytest.mark.slow
def test_pages_of_deepseek_v4(tmp_path: Path):
    """A page has the rows and inputs of its last tokens, with which the other server goes on."""
    cfg = v4.model(num_hidden_layers=3, compress_ratios=[4, 128, 0, 0])
    save_checkpoint(tmp_path, cfg, tiny_params(cfg), "float32")
    sizes = {**SIZES, "host_cache_gib": 0.01, "page_size": 128, "max_model_len": 400, "prefill_chunk": 64}
    prefiller, decoder = (LLM(tiny_tokenizer.write(tmp_path, cfg.vocab_size), **sizes) for _ in range(2))
    prompt = [5 + (7 * k * k) % 50 for k in range(300)]
    want = decoder.generate([prompt], GREEDY)[0]
    assert want.speculation.accepted > 3

    async def run() -> None:
        async with apart(prefiller, decoder) as (p, d):
            got = await ask(d, prompt)
            as_alone(got, want)
            assert got.cached_tokens == 256
            assert (stats(p), stats(d)) == ((2, {}), (2, {}))

    asyncio.run(run())
