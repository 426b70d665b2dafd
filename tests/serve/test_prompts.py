"""What may be asked of a prompt: its scores, its last tokens alone."""

import pytest

from tests.serve.helpers import GREEDY, events, post


def test_prompt_logprobs_are_the_echoed_ones(client):
    (echoed,) = post(client, prompt="abcd", echo=True, logprobs=2, max_tokens=0)["choices"]
    (choice,) = post(client, prompt="abcd", prompt_logprobs=2, max_tokens=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(echoed["logprobs"]["tokens"]) - 1 == 3
    for scores, chosen, name in zip(
        rest, echoed["logprobs"]["token_logprobs"][1:], echoed["logprobs"]["tokens"][1:], strict=True
    ):
        (of_token,) = (s for s in scores.values() if s["decoded_token"] == name)
        assert of_token["logprob"] == chosen
        assert {1, 2} <= {s["rank"] for s in scores.values()}


@pytest.mark.parametrize("prompt", ["xyzabc", [3, 4, 5, 6, 7, 8]])
def test_a_prompt_is_cut_to_its_last_tokens(client, prompt):
    ask = {**GREEDY, "max_tokens": 8, "return_token_ids": True}
    cut = post(client, prompt=prompt, truncate_prompt_tokens=3, **ask)
    whole = post(client, prompt=prompt[3:], **ask)
    assert cut["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert cut["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_scores_a_prompt(client, stream):
    body = {"prompt": "hello", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        (chunk,) = events(client, **body)
        choice = chunk["choices"][0]
    else:
        answer = post(client, **body)
        choice = answer["choices"][0]
        assert answer["usage"]["completion_tokens"] == 0
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 5
