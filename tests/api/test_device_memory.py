"""Weights that change, and memory that is given back, in Python: no answer is of two models."""

import asyncio
import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    EngineStopped,
    RequestError,
    RequestOutput,
    SamplingParams,
    Stream,
)
from mtp_jax.api.local import local_runner
from mtp_jax.checkpoint.digest import folder_digest
from mtp_jax.checkpoint.folder import open_folder
from mtp_jax.checkpoint.safetensors_file import open_file
from mtp_jax.engine.engine import Engine
from tests.checkpoint.files import drop_nextn, edit_tensors
from tests.golden import expected, model_dir
from tests.models import slowed

pytestmark = pytest.mark.usefixtures("shared_programs")

RIGGED = model_dir("rigged")
SIZES = {"max_num_seqs": 2, "max_model_len": 96, "page_size": 16, "prefill_chunk": 16, "compile_cache": None}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = expected("rigged")["input_ids"].tolist()[:20]


def opened(path: Path) -> LLM:
    """An LLM that has the programs of a full batch, which cover all that these tests ask for."""
    found = LLM(path, **SIZES)
    found.warm_up([PROMPT] * 2, GREEDY)
    found.engine.prepare = lambda *given, **named: None  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def llm(shared_programs) -> LLM:
    return opened(RIGGED)


@pytest.fixture(autouse=True)
def _no_further_programs(_first_programs_alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the LLM, too, do with the programs that it has."""
    monkeypatch.setattr(Engine, "warm_up_keys", lambda self: ([], []))


@pytest.fixture(autouse=True)
def as_it_was(llm: LLM):
    """Every test begins with the weights of RIGGED and a cache."""
    yield
    llm.engine.resume()
    llm.update_weights(RIGGED)
    llm.resume_memory()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights: every logit has the other sign."""

    def negate(tensors) -> None:
        norm = tensors["model.norm.weight"]
        values = -np.frombuffer(norm.data, np.float32)
        tensors["model.norm.weight"] = type(norm)(norm.dtype, norm.shape, values.tobytes())

    return edit_tensors(RIGGED, tmp_path_factory.mktemp("other") / "model", negate)


@pytest.fixture(scope="module")
def answers(other: Path) -> dict[str, list[int]]:
    """Greedy tokens of either model, from engines that never saw the other."""
    found = {name: tokens(opened(path)) for name, path in (("rigged", RIGGED), ("other", other))}
    assert found["rigged"] != found["other"]
    return found


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def test_an_update_makes_it_the_other_model(llm, other, answers):
    assert tokens(llm) == answers["rigged"]
    found = llm.update_weights(other, weight_version="other", probe=[PROMPT])
    assert (found.weight_version, llm.weight_version) == ("other", "other")
    assert found.acceptance_before is not None
    assert found.acceptance_after is not None
    assert found.acceptance_before > 1.5
    (output,) = llm.generate(PROMPT, GREEDY)
    assert (output.weight_version, output.outputs[0].token_ids) == ("other", answers["other"])
    arrays = {n: t.array() for n, t in open_file(next(RIGGED.glob("*.safetensors"))).items()}
    found = llm.update_weights(arrays)
    assert found.acceptance_before is None  # no tokenizer, and no prompt to probe with
    assert found.weight_version.isdigit()
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.weight_version == found.weight_version
    assert output.outputs[0].token_ids == answers["rigged"]
    assert output.speculation.acceptance_length > 1.5


def test_drafts_that_no_longer_fit_show_in_the_probe(llm, tmp_path, answers):
    name = next(n for n in _names() if n.endswith("eh_proj.weight"))
    broken = edit_tensors(RIGGED, tmp_path / "broken", lambda t: t.update({name: t[name].filled(0)}))
    found = llm.update_weights(broken, probe=[PROMPT])
    assert found.acceptance_before is not None
    assert found.acceptance_after is not None
    assert found.acceptance_after < found.acceptance_before
    assert tokens(llm) == answers["rigged"]  # the trunk verifies


def test_numbers_that_are_not_finite_show_in_the_probe(llm, tmp_path, answers):
    norm = "model.norm.weight"
    broken = edit_tensors(RIGGED, tmp_path / "nan", lambda t: t.update({norm: t[norm].filled(255)}))
    assert llm.update_weights(broken, probe=[PROMPT]).acceptance_after == 0.0
    llm.update_weights(RIGGED)
    assert tokens(llm) == answers["rigged"]


def test_a_refused_update_changes_nothing(llm, tmp_path, other, answers):
    version = llm.weight_version
    damaged = tmp_path / "damaged"
    edit_tensors(other, damaged, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): model\.norm\.weight"):
        llm.update_weights(damaged)
    with pytest.raises(RequestError, match="token"):
        llm.update_weights(other, probe=[[10**6]])
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="streams are open"):
        llm.update_weights(other)
    stream.close()
    assert (llm.weight_version, tokens(llm)) == (version, answers["rigged"])


def test_memory_is_released_and_resumed(llm, answers):
    runner = local_runner(llm.engine)
    llm.release_memory(["cache", "draft"])
    assert llm.released == ("draft", "cache")
    held = jax.tree.leaves((runner.params.nextn, runner.state))
    assert not any(isinstance(leaf, jax.Array) for leaf in held)
    for call in (lambda: tokens(llm), lambda: llm.score(PROMPT), lambda: llm.draft(PROMPT, 1)):
        with pytest.raises(EngineStopped, match="memory of draft, cache is released"):
            call()
    llm.resume_memory(["draft"])
    assert llm.released == ("cache",)
    llm.resume_memory()
    llm.resume_memory()  # nothing is left to do
    assert tokens(llm) == answers["rigged"]
    assert llm.generate(PROMPT, GREEDY)[0].speculation.acceptance_length > 1.5


def test_without_a_backup_an_update_brings_weights_back(llm, answers):
    llm.release_memory(backup=False)
    with pytest.raises(RequestError, match="weights, draft: released without a backup"):
        llm.resume_memory()
    assert llm.update_weights(RIGGED, probe=[PROMPT]).acceptance_after is None  # there is no cache yet
    assert llm.released == ("cache",)
    llm.resume_memory(["cache"])
    assert tokens(llm) == answers["rigged"]


@pytest.mark.parametrize("tags", [["all"], [], "cache"])
def test_unknown_tags_are_refused(llm, tags):
    with pytest.raises(ConfigError, match="expected a list of 'weights', 'draft', 'cache'"):
        llm.release_memory(tags)
    assert llm.released == ()


@pytest.mark.parametrize("updates", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_no_answer_is_of_two_models(llm, other, answers, tmp_path, updates):
    """Under load, with prompts of several completions; one update of a damaged file changes nothing."""
    damaged = edit_tensors(other, tmp_path / "damaged", lambda t: t.pop("model.norm.weight"))
    clean = llm.weight_version
    versions = {clean: "rigged"}

    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            stop, outputs = asyncio.Event(), []

            async def client() -> None:
                while not stop.is_set():
                    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=3)
                    outputs.append([o async for o in allm.generate(PROMPT, params)][-1])

            clients = [asyncio.create_task(client()) for _ in range(4)]
            for i, name in zip(range(updates), itertools.cycle(("other", "rigged")), strict=False):
                if i == updates // 2:
                    with pytest.raises(CheckpointError):
                        await allm.update_weights(damaged)
                path = other if name == "other" else RIGGED
                found = await allm.update_weights(path, weight_version=f"v{i}", probe=[PROMPT])
                versions[found.weight_version] = name
                assert found.acceptance_after is not None
            stop.set()
            await asyncio.gather(*clients)
            seen = set()
            for output in outputs:
                assert output.weight_version is not None
                seen.add(versions[output.weight_version])
                right = answers[versions[output.weight_version]]
                assert [c.token_ids for c in output.outputs] == [right] * 3
            assert seen == {"rigged", "other"}

    asyncio.run(run())


def test_a_release_waits_for_what_runs_and_refuses_what_comes(llm, answers):
    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            with slowed(llm.engine, 0.02):
                stream = await allm.submit(PROMPT, GREEDY)
                release = asyncio.create_task(allm.release_memory(["cache"]))
                while not allm._falling_asleep:
                    await asyncio.sleep(0)
                with pytest.raises(EngineStopped, match="about to be released"):
                    await allm.submit(PROMPT, GREEDY)
                assert [o async for o in stream][-1].outputs[0].token_ids == answers["rigged"]
                await release
            with pytest.raises(EngineStopped, match="memory of cache is released"):
                await allm.submit(PROMPT, GREEDY)
            await allm.resume_memory()
            version, states = await allm.hidden_states(PROMPT, [-1])
            assert (version, states.shape[0]) == (llm.weight_version, 1)
            stream = await allm.submit(PROMPT, GREEDY)
            assert [o async for o in stream][-1].outputs[0].token_ids == answers["rigged"]

    asyncio.run(run())


def test_an_update_that_waits_does_not_outlive_the_engine(llm, other):
    async def run() -> None:
        with slowed(llm.engine, 0.02):
            async with AsyncLLM(llm) as allm:
                await allm.submit(PROMPT, GREEDY)
                update = asyncio.create_task(allm.update_weights(other))
                while not llm.engine.scheduler.held:
                    await asyncio.sleep(0.001)
        with contextlib.suppress(EngineStopped):  # or it came through before the end
            await asyncio.wait_for(update, 60)

    asyncio.run(run())


def _names() -> list[str]:
    return [name for file in RIGGED.glob("*.safetensors") for name in open_file(file)]


def test_the_identity_of_weights_follows_updates(other, tmp_path):
    """Equal weights are equal from any source; a drafter that stays keeps its part."""
    llm, late = LLM(RIGGED, **SIZES), LLM(RIGGED, **SIZES)
    rigged = llm.identify().now()
    assert rigged
    assert rigged.weights == rigged.drafts == folder_digest(RIGGED, weights=True)
    llm.update_weights(other, probe=())
    assert llm.identify().now() == LLM(other, **SIZES).identify().now() != rigged
    arrays = {n: t.array() for n, t in open_folder(RIGGED).tensors.items()}
    llm.update_weights(arrays, probe=())
    assert llm.identify().now() == rigged
    trunk = edit_tensors(RIGGED, tmp_path / "trunk", drop_nextn(RIGGED))
    llm.update_weights(trunk, probe=(), keep_draft=True)
    now = llm.identify().now()
    assert now
    assert (now.weights, now.drafts) == (folder_digest(trunk, weights=True), rigged.drafts)
    with pytest.raises(CheckpointError):
        llm.update_weights({}, probe=())
    assert llm.identify().now() == now
    late.update_weights(other, probe=())
    with pytest.raises(ConfigError, match="the weights were updated before their identity was asked for"):
        late.identify()


def test_weights_that_are_half_replaced_have_no_identity(other, monkeypatch):
    llm = LLM(RIGGED, **SIZES)
    identity = llm.identify()
    new = llm.read_weights(other)
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "new_weights", lambda version: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.replace_weights(new, probe=())
    assert identity.now() is None
    llm.update_weights(other, probe=())
    assert identity.now() == new.digests


def test_a_pause_ends_with_the_server(llm, answers):
    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            await allm.pause.begin()
            await allm.submit(PROMPT, GREEDY)

    asyncio.run(run())
    assert tokens(llm) == answers["rigged"]


async def paused(allm: AsyncLLM, params: SamplingParams) -> tuple[Stream, list[int]]:
    """A stream whose request a pause keeps, and its tokens so far."""
    with slowed(allm.llm.engine, 0.02):
        stream = await allm.submit(PROMPT, params)
        output = await anext(stream)
        await allm.pause.begin("in_place")
    with contextlib.suppress(TimeoutError):  # the last launches may have brought more
        output = await asyncio.wait_for(anext(stream), 0.01)
    return stream, output.outputs[0].token_ids


def test_kept_requests_go_on_with_new_weights(llm, other, answers):
    params = replace(GREEDY, max_tokens=40)

    async def run() -> tuple[list[int], RequestOutput]:
        async with AsyncLLM(llm) as allm:
            stream, before = await paused(allm, params)
            found = await allm.update_weights(other, weight_version="other", probe=[PROMPT])
            assert found.acceptance_after is not None  # the probe is no request that a pause keeps
            assert allm.live == 1
            await allm.pause.end()
            return before, [o async for o in stream][-1]

    before, output = asyncio.run(run())
    tokens = output.outputs[0].token_ids
    assert (len(tokens), output.weight_version) == (40, "other")
    assert tokens[: len(before)] == before == answers["rigged"][: len(before)]
    rest = replace(GREEDY, max_tokens=40 - len(before))
    assert tokens[len(before) :] == llm.generate(PROMPT + before, rest)[0].outputs[0].token_ids


def test_a_pause_lets_memory_go(llm):
    params = replace(GREEDY, max_tokens=40)
    whole = llm.generate(PROMPT, params)[0].outputs[0].token_ids

    async def run() -> list[int]:
        async with AsyncLLM(llm) as allm:
            stream, _ = await paused(allm, params)
            await allm.release_memory()
            with pytest.raises(EngineStopped, match="resume it"):
                await allm.pause.end()
            await allm.resume_memory()
            await allm.pause.end()
            return [o async for o in stream][-1].outputs[0].token_ids

    assert asyncio.run(run()) == whole


def test_a_release_that_waits_need_not_wait_for_a_pause(llm):
    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            with slowed(llm.engine, 0.02):
                await allm.submit(PROMPT, GREEDY)
                release = asyncio.create_task(allm.release_memory(["cache"]))
                while not allm._falling_asleep:
                    await asyncio.sleep(0)
                await allm.pause.begin("retract")
                await release
            await allm.resume_memory()
            await allm.pause.begin("abort")
            await allm.pause.end()
            assert allm.live == 0

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["stop", None, ""])
def test_unknown_modes_of_a_pause_are_refused(llm, mode):
    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            with pytest.raises(RequestError, match="expected 'abort', 'retract', 'in_place'"):
                await allm.pause.begin(mode)

    asyncio.run(run())
