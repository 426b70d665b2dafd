"""Families of models in small: what their chat templates write of calls, and their tags as tokens."""

import functools
import re
from typing import Any

import tokenizers
from llguidance import LLTokenizer
from tokenizers import AddedToken

from mtp_jax.api.demo import demo_model
from mtp_jax.text import render, tokenizer
from mtp_jax.text.grammar import MAX_GRAMMAR_LENGTH, embedded
from mtp_jax.text.plain_text import token_table
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.formats import DSML, FORMATS, Format
from mtp_jax.text.tools.rules import Vocabulary

EOS = 1
_BAR = "\uff5c"  # full width
_V3 = (
    "{%- for t in m.tool_calls %}{%- if loop.first %}{{ '<|tool▁calls▁begin|>' }}{%- else %}{{ SEP }}"
    "{%- endif %}{{ '<|tool▁call▁begin|>' + BEFORE + t.function.name + AFTER + t.function.arguments + END }}"
    "{%- endfor %}{{ '<|tool▁calls▁end|>' }}"
)


def _v3(sep: str, before: str, after: str, end: str) -> str:
    places = {"SEP": sep, "BEFORE": before, "AFTER": after, "END": end + "<|tool▁call▁end|>"}
    return functools.reduce(lambda text, p: text.replace(p[0], repr(p[1])), places.items(), _V3).replace(
        "|", _BAR
    )


_VALUE = "{{ v | tojson(ensure_ascii=False) if v is not string else v }}"
TEMPLATES = {
    "deepseek_v3": _v3("\n", "function<|tool▁sep|>", "\n```json\n", "\n```"),
    "deepseek_v31": _v3("", "", "<|tool▁sep|>", ""),
    **{name: path.read_text(encoding="utf-8") for name, path in tokenizer._TEMPLATES.items()},
    "glm45": (
        "{% for t in m.tool_calls %}\n{{ '\\n<tool_call>' + t.function.name }}\n"
        "{% for k, v in t.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
        f"<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}\n</tool_call>{{% endfor %}}"
    ),
    "glm47": (
        "{% for t in m.tool_calls %}\n{{- '<tool_call>' + t.function.name -}}\n"
        "{% for k, v in t.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        f"<arg_value>{_VALUE}</arg_value>{{% endfor %}}</tool_call>{{% endfor %}}"
    ),
    "gigachat3": (
        '{% for t in m.tool_calls %}<|function_call|>{{ \'{"name": "\' + t.function.name }}'
        "{{ '\", \"arguments\": ' }}{{ t.function.arguments | tojson }}{{ '}' }}{% endfor %}"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>{% for t in m.tool_calls %}<|tool_call_begin|>{{ t.id }}"
        "<|tool_call_argument_begin|>{{ t.function.arguments }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>"
    ),
    "json": (
        '{% for t in m.tool_calls %}{{ \'\\n\' }}<tool_call>\n{"name": "{{ t.function.name }}", "arguments": '
        "{{ t.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    ),
}


def rendered(name: str, calls: list[tuple[str, str]]) -> str:
    """What a family's template writes for calls, names with JSON text."""
    functions = [
        {"id": f"functions.{f}:{i}", "type": "function", "function": {"name": f, "arguments": a}}
        for i, (f, a) in enumerate(calls)
    ]
    source = TEMPLATES[name]
    if name not in tokenizer._TEMPLATES:
        source = "{% for m in messages %}{% if m.tool_calls %}" + source + "{% endif %}{% endfor %}"
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": functions},
    ]
    variables = {"messages": messages, "thinking": False, "bos_token": "", "eos_token": ""}
    text = render._answer(_compiled, source, variables)["text"]
    return text.partition("</think>")[2] if name in tokenizer._TEMPLATES else text


_compiled = functools.lru_cache(render._environment().from_string)


def tags(form: Format) -> list[str]:
    """The tags of a format, and of thoughts; of DeepSeek's markup the releases have the mark alone."""
    texts = [form.head, form.end, *form.opens, *form.block_ends]
    if form.parameter:
        texts += [form.parameter.before_key, form.parameter.before_value, form.parameter.end]
    found = {DSML if DSML in tag else tag for text in texts for tag in re.findall(r"<[^<>\s{}]+>", text)}
    return sorted(
        found - {"<|tool_call_section_begin|>", "<|tool_call_section_end|>"} | {"<think>", "</think>"}
    )


@functools.cache
def backend(name: str, as_tokens: str) -> tokenizers.Tokenizer:
    """The demo model's, the tags of a format added as "tokens", as "special" ones, or not at all."""
    found = tokenizers.Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    if as_tokens != "text":
        # `add_special_tokens` makes them special, whatever they say.
        found.add_tokens([AddedToken(tag, special=as_tokens == "special") for tag in tags(FORMATS[name])])
    return found


@functools.cache
def compiled(name: str, as_tokens: str) -> LLTokenizer:
    """The same in llguidance's form."""
    found = backend(name, as_tokens)
    return token_table(Tokenizer(found, {}, {}), found.get_vocab_size(), [EOS]).compiled


def vocabulary(found: tokenizers.Tokenizer) -> Vocabulary:
    """What its grammars are made of."""
    added = {token.content: i for i, token in found.get_added_tokens_decoder().items()}
    return Vocabulary(added.get, embedded, MAX_GRAMMAR_LENGTH)


def joined(parts: list[Any]) -> list[Any]:
    """Neighbours of one kind are one part."""
    found: list[Any] = []
    for part in parts:
        last = found[-1] if found else None
        same = type(part) is type(last) and getattr(part, "index", 0) == getattr(last, "index", 0)
        if last is not None and same and hasattr(part, "text"):
            found[-1] = type(part)(**{**vars(part), "text": last.text + part.text})
        else:
            found.append(part)
    return found
