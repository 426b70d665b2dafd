"""The tokenizer of random weights: a token for each byte, a word for every other id."""

from pathlib import Path

from mtp_jax.text.stand_in import stand_in


def test_bytes_and_numbers(tmp_path: Path):
    found = stand_in(tmp_path, 300)
    assert found is not None
    text = "Grüße,\n <think> 257 \x00"
    assert found.encode(text) == list(text.encode())
    assert found.decode(found.encode(text)) == text
    assert found.decode([65, 256, 299, 66]) == "A 256 299B"
    assert (found.vocab_size, found.eos_ids, found.bos_id) == (300, (), None)


def test_a_template_of_the_folder_precedes_the_plain_one(tmp_path: Path):
    messages = [{"role": "user", "content": "hello"}]
    found = stand_in(tmp_path, 256)
    assert found is not None
    assert found.apply_chat_template(messages) == "user: hello\nassistant:"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    own = stand_in(tmp_path, 256)
    assert own is not None
    assert own.apply_chat_template(messages) == "hello!"


def test_too_few_tokens_for_bytes(tmp_path: Path):
    assert stand_in(tmp_path, 255) is None
