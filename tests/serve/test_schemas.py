"""Schemas of which a part cannot be enforced: errors and warnings say where that part is in the request."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field, SecretStr

from tests.serve.helpers import ASK, PLAIN, body_of

PROPERTIES = {
    "kept": {"enum": ["here"]},
    "x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "null"},
    },
    "site": {"type": "string", "format": "iri", "maxLength": 2},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["kept"],
    "additionalProperties": False,
}
FORM = {"name": "n", "schema": SCHEMA}
PATHS = {
    "/v1/chat/completions": "tools.1.function.parameters",
    "/v1/responses": "tools.1.parameters",
    "/v1/messages": "tools.1.input_schema",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["json", pytest.param("glm47", marks=pytest.mark.rest)])
def test_a_forced_call_is_held_to_the_rest_unless_the_tool_is_strict(server, form, path):
    variant, place = server.variant(tool_parser=form), f"{PATHS[path]}.properties.x"
    body = body_of(path, {"name": "f", "parameters": SCHEMA}, forced=True)
    other = body_of(path, {"name": "other", "parameters": {"type": "object"}}, forced=False)["tools"]
    body["tools"] = [*other, *body["tools"]]
    if path == "/v1/chat/completions":
        body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    answer = variant.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == f'299 mtp-jax "ignored: {place}.uniqueItems"'
    (_, tool) = body["tools"]
    tool.get("function", tool)["strict"] = True
    refused = variant.post(path, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith(f"{place}: uniqueItems cannot be enforced; ")
    assert error.get("param", place) == place
    body["tool_choice"] = {"type": "auto"} if path == "/v1/messages" else "auto"
    del tool.get("function", tool)["strict"]
    assert "warning" not in variant.post(path, json=body).headers


def test_what_only_llguidance_finds_has_its_place_too(server):
    """A number that no value fits, and a reference to itself, each in a tool of two."""
    loop = {"$ref": "#/$defs/loop", "minimum": 1}
    wrong = {
        "n": {"type": "integer", "minimum": 3, "maximum": 2},
        "m": {"$ref": "#/$defs/loop", "type": "integer"},
        "kept": {"const": 5},
    }
    schema = {
        "properties": wrong,
        "required": ["kept"],
        "$defs": {"loop": loop},
        "additionalProperties": False,
    }
    body = body_of("/v1/chat/completions", {"name": "f", "parameters": {}}, forced=True)
    function = {"name": "g", "parameters": schema}
    body["tools"].append({"type": "function", "function": function})
    for form in ("json", "glm47"):
        variant = server.variant(tool_parser=form)
        function["strict"] = False
        answer = variant.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        place = "tools.1.function.parameters.properties"
        assert answer.headers["warning"] == f'299 mtp-jax "ignored: {place}.n, {place}.m"'
        function["strict"] = True
        error = variant.post("/v1/chat/completions", json=body).json()["error"]
        assert error["message"].startswith(
            f"{place}.n: Unsatisfiable schema: minimum (3) is greater than maximum (2);"
        )
        assert error["param"] == f"{place}.n"


@pytest.mark.parametrize(
    ("path", "fields", "place", "strict"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": FORM}}, "", False),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": FORM | {"strict": True}}},
            "response_format.json_schema.schema",
            True,
        ),
        (
            "completions",
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
            False,
        ),
        ("chat/completions", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", True),
        ("responses", {"text": {"format": {"type": "json_schema", **FORM}}}, "text.format.schema", False),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "strict": True, **FORM}}},
            "text.format.schema",
            True,
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format.schema",
            True,
        ),
        (
            "/generate",
            {"sampling_params": {"json_schema": json.dumps(SCHEMA)}},
            "sampling_params.json_schema",
            True,
        ),
    ],
)
def test_an_answers_schema_is_refused_where_it_must_be_kept_to(client, path, fields, place, strict):
    told = {"responses": {"input": "q"}, "completions": {"prompt": "q"}, "/generate": {"text": "q"}}
    path, own = path if path[0] == "/" else f"/v1/{path}", told.get(path, {"messages": ASK, "max_tokens": 4})
    answer = client.post(path, json=own | fields)
    place = f"{place or 'response_format.json_schema.schema'}.properties.x"
    assert answer.status_code == (400 if strict else 200), answer.text
    if strict:
        end = ", or leave out strict" if place.startswith(("response", "text")) else ""
        says = f"{place}: uniqueItems cannot be enforced; leave it out{end}"
        assert answer.json()["error"]["message"] == says
        assert answer.json()["error"].get("param", place) == place
    else:
        shown = (
            place.replace("json_schema.schema.prop", "json_sc..a.schema.prop") if len(place) > 52 else place
        )
        assert answer.headers["warning"] == f'299 mtp-jax "ignored: {shown}.uniqueItems"'


class _Cat(BaseModel):
    kind: Literal["cat"]


class _Dog(BaseModel):
    kind: Literal["dog"]


class _Model(BaseModel):
    secret: SecretStr = Field(max_length=4)
    raw: bytes = Field(max_length=4)
    by_name: dict[Literal["a", "b"], Literal[1]]
    pet: _Cat | _Dog = Field(discriminator="kind")


class _Call(BaseModel):
    path: Path = Field(json_schema_extra={"maxLength": 4})
    pet: _Cat | _Dog = Field(discriminator="kind")


def test_the_schemas_of_pydantic_are_enforced(api):
    """Formats without a meaning here, names of keys, and unions told apart by a key."""
    plain = PLAIN | {"max_tokens": 300}
    parsed = api.chat.completions.parse(messages=ASK, response_format=_Model, **plain)
    assert isinstance(parsed.choices[0].message.parsed, _Model)
    tool: Any = pydantic_function_tool(_Call)
    forced = api.chat.completions.parse(
        messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, **plain
    )
    (call,) = forced.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, _Call)
