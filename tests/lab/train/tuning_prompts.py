"""Prompts for docs/tune-head.md: ``python -m tests.lab.train.tuning_prompts COUNT > prompts.jsonl``.

Each is the beginning of a file of the standard library that the embedded model was trained on.
"""

import json
import sys

from mtp_jax.lab.bench import corpus

_CHARACTERS = 400  # of a file: about 120 tokens


def main() -> None:
    """Print prompts, one JSON object per line, of files spread over the library."""
    count = int(sys.argv[1])
    files = [f for f in corpus.split(corpus.read_files()).train if len(f.text) > _CHARACTERS]
    for i in range(count):
        print(json.dumps({"prompt": files[i * len(files) // count].text[:_CHARACTERS]}))


if __name__ == "__main__":
    main()
