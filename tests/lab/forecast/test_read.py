"""Files of loads: our own form, and public traces'."""

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise, takewhile

import numpy as np
import pytest

from mtp_jax.decode.law import GOLDEN, golden_rates
from mtp_jax.errors import ConfigError
from mtp_jax.lab.forecast.load import Arrival, read
from mtp_jax.lab.planning.deployment import tokens_per_step

OWN = '{"arrival": 2.5, "prompt_tokens": 7, "output_tokens": 3, "acceptance": [0.9, 0.5]}\n'
FILES = {
    "own": (
        OWN + '\n{"arrival": 0.5, "prompt_tokens": 600, "output_tokens": 1}\n',
        [Arrival(3, 0, 600, 1), Arrival(1, 2, 7, 3, (0.9, 0.5))],
    ),
    "Mooncake": (
        '{"timestamp": 3000, "input_length": 1053, "output_length": 26, "hash_ids": [0, 773, 774]}\n'
        '{"timestamp": 5999, "input_length": 7, "output_length": 11, "hash_ids": [0]}\n',
        [Arrival(1, 0, 1053, 26, None, (0, 773, 774)), Arrival(2, 2.999, 7, 11, None, (0,))],
    ),
    "Azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:16:46.6805900,396,109\n",
        [Arrival(2, 0, 374, 44), Arrival(3, 60, 396, 109)],
    ),
    "BurstGPT": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n",
        [Arrival(2, 0, 472, 18), Arrival(3, 40, 1087, 230)],
    ),
    "other": ("arrival,prompt_tokens,output_tokens,acceptance\n1,2,3,\n", [Arrival(2, 0, 2, 3)]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_form_is_known_by_its_fields(tmp_path, name):
    text, expected = FILES[name]
    (tmp_path / "load").write_text(text)
    found = read(tmp_path / "load")
    assert [a.at for a in found] == pytest.approx([a.at for a in expected])
    assert [vars(a) | {"at": 0} for a in found] == [vars(a) | {"at": 0} for a in expected]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arrival": -1}, "arrival = -1; expected a number of 0 or more"),
        ({"arrival": "soon"}, "arrival = 'soon'; expected a number"),
        ({"arrival": float("inf")}, "arrival = inf; expected a number"),
        ({"prompt_tokens": 0}, "prompt_tokens = 0; expected an integer of 1 or more"),
        ({"output_tokens": 1.5}, "output_tokens = 1.5; expected an integer"),
        ({"output_tokens": True}, "output_tokens = True; expected an integer"),
        ({"acceptance": 1.5}, "acceptance = 1.5; expected rates from 0 to 1, or one of glm-5.2"),
        ({"acceptance": []}, "acceptance = []; expected rates"),
        ({"acceptance": "glm"}, "acceptance = 'glm'; expected rates"),
        ({"output_tokens": 10**400}, "output_tokens = 1000"),
        ({"hash_ids": 5}, "hash_ids = 5; expected integers"),
        ({"hash_ids": [-1]}, "hash_ids = [-1]; expected integers of 0 or more"),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path, change, says):
    (tmp_path / "load").write_text(OWN + json.dumps(json.loads(OWN) | change))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "load")
    assert f"load, line 2: {says}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "load has no arrivals"),
        (OWN + "{", "load, line 2 is not JSON: "),
        (OWN + "[1]", "load, line 2: '[1]'; expected a JSON object"),
        ('{"at": 1}', "load, line 1: 'at' lacks fields; expected arrival, prompt_tokens, output_tokens or "),
        (f"arrival,prompt_tokens,output_tokens\n1,2,{'3' * 200_000}\n", "line 2 is not CSV: field larger"),
        (OWN + '{"a": ' + "[" * 100_000, "line 2 is not JSON"),
        ("a,b\n1,2\n", "load, line 2: 'a, b' lacks fields"),
        ("arrival,prompt_tokens,output_tokens\n1,2\n", "line 2: output_tokens = None; expected an integer"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
            "line 2: TIMESTAMP = 'noon'; expected a date",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, says):
    (tmp_path / "load").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "load")
    assert says in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "bytes")


def test_blocks_of_one_name_are_alike_and_nothing_else():
    one, two = Arrival(1, 0, 1100, 1, None, (4, 5)), Arrival(2, 0, 700, 1, None, (4, 6))
    a, b = (np.array(arrival.tokens(100, 0)) for arrival in (one, two))
    assert (len(a), len(b)) == (1100, 700)
    assert (a[:512] == b[:512]).all()
    assert np.mean(a[512:700] == b[512:]) < 0.1
    c, d = (np.array(Arrival(line, 0, 1000, 1).tokens(100, 0)) for line in (1, 2))
    assert np.mean(c == d) < 0.1
    assert one.tokens(100, 0) == a.tolist() != one.tokens(100, 1)


def test_blocks_behind_the_prompt_cost_nothing():
    """A trace may name blocks of a conversation's end; only the prompt's own are drawn."""
    many = Arrival(1, 0, 10, 1, None, (4, *range(2**18)))
    tracemalloc.start()
    found = many.tokens(100, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == replace(many, blocks=(4,)).tokens(100, 0)
    assert peak < 2**18  # bytes: a token of each block would take eight times as many


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rates_have_the_golden_length_at_every_depth(name):
    """Until a later draft is kept more often than the draft before it, or less often than never."""
    rates, lengths = golden_rates(name), GOLDEN[name]
    shares = [1.0, *(more - less for less, more in pairwise((1.0, *lengths)))]
    falling = [*takewhile(lambda pair: pair[0] >= pair[1] >= 0, pairwise(shares))]
    assert len(falling) >= 3
    for depth in range(1, len(falling) + 1):
        assert tokens_per_step(rates, depth) == pytest.approx(lengths[depth - 1])
    assert len(rates) == len(lengths)
    assert all(0 <= rate <= 1 for rate in rates)
