"""A tokenizer for checkpoints of any small vocabulary: one token per printable character, the rest pairs."""

import json
import shutil
from itertools import product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import golden

BOS, EOS = "<bos>", "<eos>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def model(folder: Path) -> Path:
    """Copy a golden checkpoint whose drafts are accepted, with a tokenizer, to a new folder; return it."""
    shutil.copytree(golden.model_dir("rigged"), folder)
    return write(folder, golden.raw_config("rigged")["vocab_size"])


def write(folder: Path, vocab_size: int, template: str | None = TEMPLATE) -> Path:
    """Add tokenizer.json and tokenizer_config.json to a folder and return it; ids 0 and 1 are bos and eos."""
    # Byte-level BPE writes a line end as U+010A and a space as U+0120.
    characters = ["\u010a", "\u0120", *map(chr, range(0x21, 0x7F))]
    pairs = map("".join, product(ascii_lowercase, repeat=2))
    contents = [BOS, EOS, *characters, *pairs][:vocab_size]
    backend = Tokenizer(models.BPE({content: i for i, content in enumerate(contents)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
