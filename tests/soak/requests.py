"""Random requests for a soak: every option, schemas, and what is wrong on purpose."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mtp_jax.lab.bench import corpus

Kind = Literal["valid", "aborted", "invalid"]
_INVALID_SHARE, _ABORTED_SHARE = 0.1, 0.2
_MOST_TOKENS = 48


@dataclass(frozen=True)
class Asked:
    """A request of a soak.

    Attributes:
        kind: the client of "aborted" ones disconnects after ``patience`` seconds; "invalid" ones get a 4xx.
        url: of the route.
        body: JSON, or bytes that are none.
        patience: seconds; None: until the end.
    """

    kind: Kind
    url: str
    body: bytes
    patience: float | None

    @property
    def options(self) -> dict[str, Any]:
        """The body, of one that is valid."""
        return json.loads(self.body)

    @property
    def greedy(self) -> bool:
        """Whether the same request must get the same tokens at any depth."""
        return self.kind == "valid" and self.options["temperature"] == 0


def texts(rng: random.Random, count: int, characters: int) -> list[str]:
    """Pieces of the standard library's source on which the embedded model was not trained."""
    files = [f.text for f in corpus.split(corpus.read_files()).held_out if len(f.text) > characters]
    chosen = [(text, rng.randrange(len(text) - characters)) for text in rng.choices(files, k=count)]
    return [text[at : at + characters] for text, at in chosen]


def probe(model: str) -> Asked:
    """A chat: not every model has a template."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return Asked("valid", "/v1/chat/completions", json.dumps(body).encode(), None)


def make(rng: random.Random, text: Callable[[int], str], model: str, chat: bool) -> Asked:
    """Draw a request. ``text``: a piece of text of so many characters. chat: whether the model can."""
    chance = rng.random()
    if chance < _INVALID_SHARE:
        return Asked("invalid", "/v1/completions", rng.choice(WRONG)(model), None)
    body = _valid(rng, text, model, chat)
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if chance < _INVALID_SHARE + _ABORTED_SHARE:
        body["max_tokens"] = _MOST_TOKENS
        return Asked("aborted", url, json.dumps(body).encode(), rng.expovariate(5))
    return Asked("valid", url, json.dumps(body).encode(), None)


def without_drafts(asked: Asked) -> Asked:
    """The same at depth 0, at once in one piece."""
    body = asked.options | {"speculative": {"enabled": False}, "stream": False}
    body.pop("stream_options", None)
    return Asked("valid", asked.url, json.dumps(body).encode(), None)


def _valid(rng: random.Random, text: Callable[[int], str], model: str, chat: bool) -> dict[str, Any]:
    prompt = text(rng.choice((1, 20, 100, 300)))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": rng.randint(1, _MOST_TOKENS),
        "temperature": rng.choice((0, 0, 0.7, 1.3)),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "return_token_ids": True,
        "stream": rng.random() < 0.6,
    }
    if chat and rng.random() < 0.3:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    sometimes: dict[str, Callable[[], Any]] = {
        "top_p": lambda: rng.uniform(0.5, 1),
        "top_k": lambda: rng.randint(1, 50),
        "min_p": lambda: rng.uniform(0, 0.3),
        "seed": lambda: rng.randrange(2**31),
        "presence_penalty": lambda: rng.uniform(-1, 1),
        "frequency_penalty": lambda: rng.uniform(-1, 1),
        "repetition_penalty": lambda: rng.uniform(0.8, 1.3),
        "logit_bias": lambda: {str(rng.randrange(32)): rng.uniform(-10, 10)},
        "stop": lambda: rng.choice((["\n\n"], ["e"], ["def ", "return"])),
        "ignore_eos": lambda: True,
        "priority": lambda: rng.randint(-2, 2),
        "cache_salt": lambda: rng.choice("ab"),
        "speculative": lambda: rng.choice(({"max_tokens": rng.randint(0, 2)}, {"enabled": False})),
        "logprobs": lambda: "messages" in body or rng.randint(0, 5),
        "structured_outputs": lambda: _structure(rng),
    }
    body |= {name: draw() for name, draw in sometimes.items() if rng.random() < 0.15}
    if "structured_outputs" in body:
        body.pop("ignore_eos", None)  # they end where their grammar does
    return body


def _structure(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["alpha", "beta", "gamma", "delta"], rng.randint(1, 3))
    types: tuple[dict[str, Any], ...] = (
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    )
    schema = {
        "type": "object",
        "properties": {name: rng.choice(types) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return rng.choice(({"json": schema}, {"regex": "(yes|no)( [0-9]{1,4})?"}, {"choice": ["north", "south"]}))


def _body(**given: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, "prompt": "x"} | given).encode()


# Each is answered with a 4xx.
WRONG: tuple[Callable[[str], bytes], ...] = (
    lambda model: b"{",
    lambda model: b"[1]",
    lambda model: b'{"prompt": "x", "temperature": NaN}',
    _body(model="another"),
    _body(temperature=-1),
    _body(top_p=1.5),
    _body(n=0),
    _body(max_tokens="x"),
    _body(prompt=[]),
    _body(prompt=[2**30]),
    _body(prompt="x" * 200_000),
    _body(logit_bias={"x": 1}),
    _body(structured_outputs={"regex": "("}),
    _body(structured_outputs={"json": {"type": "nonsense"}}),
    _body(stop=[""]),
    _body(suffix="y"),
)
