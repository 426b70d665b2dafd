"""An option is declared once: its check, signature, help and row in docs/options.md derive from that."""

import copy
import inspect
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mtp_jax import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.options import LLMOptions
from mtp_jax.cluster.handover.options import HandoverOptions
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.commands.options import flag_of
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.hosts.options import Hosts
from mtp_jax.lab.train.tune_options import TuneOptions
from mtp_jax.options import check, declared, documented, narrowed, option, takes
from serve.base.settings import Settings

DOCS = Path(__file__).parent.parent / "docs" / "options.md"
ANY_LLM: Any = LLM
ANY_ASYNC: Any = AsyncLLM
ALL = (LLMOptions, SamplingParams, Settings, QueueLimits, HandoverOptions, Hosts, RayOptions, TuneOptions)


@documented
@dataclass(frozen=True)
class Sizes:
    """Of something."""

    name: str = option(MISSING, "how it is called", kind=str)
    rows: int = option(3, "how many", low=1, high=9)
    rate: float = option(0.5, "how often", low=0, above=True, high=1.5)
    most: int | None = option(None, "at most", kind=int, low=1, unset="no bound")
    kind: str = option("a", "which", choices=("a", "b"))
    whole: bool = option(True, "all of it")


class Thing:
    @takes(Sizes, TypeError)
    def __init__(self, sizes: Sizes) -> None:
        """Make it."""
        check(sizes, KeyError)
        self.sizes = sizes


@pytest.mark.parametrize(
    ("name", "right", "wrong", "expected"),
    [
        ("rows", [1, 9], [0, 10, 3.0, True, None, "3"], "an integer from 1 to 9"),
        ("rate", [1e-9, 1, 1.5], [0, 1.6, float("nan"), "1", False], "a number above 0, at most 1.5"),
        ("most", [1, 10**30, None], [0, 1.0], "an integer of 1 or more or None"),
        ("kind", ["a", "b"], ["c", None, 1], "one of 'a', 'b'"),
        ("whole", [True, False], [1, "yes", None], "True or False"),
    ],
)
def test_values_are_checked(name, right, wrong, expected):
    for value in right:
        assert getattr(Thing("x", **{name: value}).sizes, name) is value
    for value in wrong:
        with pytest.raises(KeyError) as caught:
            Thing("x", **{name: value})
        assert caught.value.args == (f"{name} = {value!r}; expected {expected}",)


@dataclass(frozen=True)
class Kitchen:
    """Options in company."""

    oven: bool = option(False, "is hot")
    cake: str | None = option(None, "to bake", kind=str, unset="none", needs={"oven": (True, "it bakes")})
    eggs: int = option(1, "how many", low=0)
    flan: bool = option(
        False, "to bake", excludes={"cake": "one fits"}, needs={"eggs": (3, "it sets"), "pan": (True, "")}
    )

    def __post_init__(self) -> None:
        check(self, KeyError)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"cake": "nut"},
            "cake = 'nut' with oven = False: it bakes; take oven = True, or leave the",
        ),
        ({"flan": True}, "flan = True with eggs = 1: it sets; take eggs = 3 or more, or leave the"),
        (
            {"flan": True, "cake": ("nut",), "oven": True},
            "flan = True with cake = ('nut',): one fits; leave",
        ),
    ],
)
def test_company_is_checked(given: dict[str, Any], told: str):
    with pytest.raises(KeyError) as caught:
        Kitchen(**given)
    assert str(caught.value.args[0]).startswith(told)
    Kitchen(oven=True, cake="nut", eggs=0)
    Kitchen(flan=True, eggs=4)  # no option `pan` is there


def test_what_takes_options_has_their_signature_and_help():
    assert str(inspect.signature(Thing)).startswith(
        "(name: str, rows: int = 3, rate: float = 0.5, most: int | None"
    )
    assert "rows: how many. An integer from 1 to 9." in (Thing.__init__.__doc__ or "")
    assert "most: at most. None: no bound." in (Sizes.__doc__ or "")
    with pytest.raises(TypeError, match="Thing has no argument colour"):
        Thing("x", colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        Thing()  # type: ignore[call-arg]


def test_a_subclass_may_narrow_an_option():
    @dataclass(frozen=True)
    class Larger(Sizes):
        most: int = narrowed(Sizes, "most", 5, unset="")

    check(Larger("x"), KeyError)
    with pytest.raises(KeyError):
        check(Larger("x", most=None), KeyError)  # type: ignore[arg-type]
    assert declared(Larger)["most"].help == "at most"


def test_llm_takes_the_options_of_its_engine():
    parameters = inspect.signature(LLM).parameters
    assert list(parameters) == list(declared(LLMOptions))
    assert all(parameters[name].default == o.default for name, o in declared(LLMOptions).items())
    assert parameters["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert declared(EngineConfig).keys() == declared(EngineOptions).keys() < declared(LLMOptions).keys()


@pytest.mark.parametrize("cls", ALL)
def test_every_field_is_an_option_and_its_default_is_allowed(cls):
    assert declared(cls).keys() == set(inspect.signature(cls).parameters)
    for name, about in declared(cls).items():
        assert about.default is MISSING or about.allows(about.default), name
        assert not about.help.endswith("."), name


def company(cls: type, name: str) -> list[str]:
    """The options that go with an option, or do not, in words."""
    about, found = declared(cls)[name], list[str]()
    for other, (needed, _) in about.needs.items():
        value = f" of {needed} or more" if type(needed) is int else "" if needed is True else f" {needed}"
        found.append(f"needs `{other}`{value}")
    excluding = [
        other
        for among in ALL
        for other, its in declared(among).items()
        if name in its.excludes and (among is cls or name not in declared(among))
    ]
    found += [f"not with `{other}`" for other in (*about.excludes, *excluding)]
    found += [f"idle with{f' `{k}` 0' if off == 0 else f'out `{k}`'}" for k, off in about.idle.items()]
    return found


def table(cls: type) -> str:
    """The rows of a dataclass in docs/options.md."""
    own = declared(cls)
    others = {name: f" {', '.join(company(cls, name))} |" for name in own}
    if not any(map(str.isalnum, "".join(others.values()))):
        others = dict.fromkeys(own, "")
    more = (" company |", " :--- |") if any(others.values()) else ("", "")
    lines = ["| option | flag | default | |" + more[0], "| :--- | :--- | :--- | :--- |" + more[1]]
    for name, about in own.items():
        flag = "" if about.flag is None else f"`{flag_of(name, about)}`"
        range_ = f"; {about.expected.removesuffix(' or None')}" if about.low is not None else ""
        lines.append(f"| `{name}` | {flag} | {about.shown_default} | {about.help}{range_} |{others[name]}")
    return "\n".join(lines)


@pytest.mark.parametrize("cls", ALL)
def test_company_consists_of_options(cls):
    known = {name for cls in ALL for name in declared(cls)}
    for about in declared(cls).values():
        assert {*about.needs, *about.excludes, *about.idle} <= known


@pytest.mark.parametrize("cls", ALL)
def test_the_documentation_has_every_option(cls):
    assert table(cls) in DOCS.read_text(encoding="utf-8"), table(cls)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tensor_parallel_size", "use mesh=make_mesh(1, N), which divides heads and experts over N devices"),
        ("speculative_draft_model_path", "use draft_model=DIR"),
        ("gpu_memory_utilization", "use memory_fraction"),
        ("mem_fraction_static", "use memory_fraction"),
        ("disable_radix_cache", "use prefix_cache=False"),
        ("enable_prefix_caching", "leave it out: prefixes are kept unless prefix_cache=False"),
        ("max_running_requests", "use max_num_seqs"),
        ("model_path", "name the model's folder: MODEL, or model=DIR"),
        ("trust_remote_code", "leave it out: no code of a checkpoint is ever run"),
        ("temperature", "requests say it"),
        ("max_model_length", "do you mean --max-model-len?"),
        ("nonsense", "help(LLM) has all arguments"),
    ],
)
def test_names_of_other_engines_have_a_hint(name, hint):
    unknown: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigError) as refused:
        LLM(**unknown)
    message = str(refused.value)
    assert message.startswith(f"LLM has no argument {name}; ")
    assert hint.replace("--max-model-len", "max_model_len") in message
    assert "--" not in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("repeat_penalty", "use repetition_penalty"),
        ("guided_json", "use structured=StructuredOutput(json_schema=...)"),
        ("guided_decoding", "use structured=StructuredOutput(...)"),
        ("regex", "use structured=StructuredOutput(regex=...)"),
        ("sampling_seed", "use seed"),
        ("temprature", "do you mean temperature?"),
        ("best_of", "take n, and choose among the outputs by their logprobs"),
        ("use_beam_search", "there are no beams; n samples several texts"),
        ("nonsense", "help(SamplingParams) has all arguments"),
    ],
)
def test_sampling_parameters_have_one_too(name, hint):
    unknown: dict[str, Any] = {name: 2}
    with pytest.raises(RequestError) as refused:
        SamplingParams(**unknown)
    assert str(refused.value) == f"SamplingParams has no argument {name}; {hint}"


def test_the_hints_hide_no_signature():
    assert "max_tokens" in inspect.signature(SamplingParams).parameters
    assert list(inspect.signature(LLM.generate).parameters) == ["self", "prompts", "sampling_params"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m.generate("a", use_tqdm=False), "generate has no argument use_tqdm; leave it out: "),
        (lambda m: m.generate("a", max_tokens=4), "max_tokens; give SamplingParams(max_tokens=...)"),
        (lambda m: m.generate(prompt_token_ids=[[1]]), "give the lists of ids as prompts"),
        (lambda m: m.generate("a", None, True), "only prompts, sampling_params may have none"),
        (lambda m: m.chat([], lora_request=1), "LoRA is not supported"),
        (lambda m: ANY_ASYNC.generate(m, "a", None, "r"), "the others by name: cache_salt, prio"),
        (lambda m: ANY_ASYNC.generate(m, "a", requestid="r"), "do you mean request_id?"),
        (lambda m: ANY_LLM("demo", 3), "LLM got 2 values without a name; only model may have none"),
        (lambda m: ANY_LLM(5), "model = 5; expected a path or None"),
        (lambda m: ANY_LLM(draft_model=5), "draft_model = 5; expected a path or None"),
        (lambda m: m.get_tokenizer(), "LLM has no attribute get_tokenizer; take tokenizer"),
        (lambda m: m.nonsense, "LLM has no attribute nonsense"),
    ],
)
def test_a_call_as_another_engine_takes_it_has_a_hint(call, says):
    with pytest.raises((ConfigError, RequestError, AttributeError)) as refused:
        call(object.__new__(LLM))
    assert says in str(refused.value)
    assert replace(SamplingParams(), max_tokens=3).max_tokens == 3
    assert copy.copy(SamplingParams(n=2)).n == 2
