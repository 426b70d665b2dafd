"""Pieces of responses that a model of one character per token does not show."""

from itertools import pairwise

from mtp_jax import Logprob, Tokenizer
from mtp_jax.api.demo import demo_model
from serve.answers.shapes import TextOffsets, completion_logprobs


def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer is not None
    return tokenizer


def test_a_tokenizers_own_bos_takes_no_room_in_a_prompt_that_does_not_spell_it():
    tokenizer = demo_tokenizer()
    prompt = "def f(\u20ac):"
    ids = tokenizer.encode(prompt)
    assert ids[0] == tokenizer.bos_id
    for skip in (False, True):
        offsets = TextOffsets(tokenizer, skip)
        places = [*offsets.of_prompt(ids, prompt), *offsets.push([ids[1]])]
        assert places[:2] == [0, 0]
        assert places[-1] == len(prompt)
        assert "".join(prompt[a:b] for a, b in pairwise(places)) == prompt
        assert [prompt[a:b] for a, b in pairwise(places)][1] == tokenizer.decode([ids[1]])


def test_of_tokens_that_share_a_name_the_likeliest_is_told():
    """As parts of characters do."""
    tokenizer = demo_tokenizer()
    parts = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"][:2]
    scores = {parts[0]: Logprob(-1.0, 1), parts[1]: Logprob(-2.0, 2)}
    answer = completion_logprobs(tokenizer, [parts[1]], [scores], [0])
    assert answer["top_logprobs"] == [{"\ufffd": -1.0}]
    assert answer["token_logprobs"] == [-2.0]
