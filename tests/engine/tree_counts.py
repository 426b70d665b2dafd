"""Count what trees of drafts take and give: ``python -m tests.engine.tree_counts TEMPERATURE...``.

The demo model completes a few prompts at fixed depths. No clock: tokens, rows and passes are counted.
"""

import sys

import jax
import jax.numpy as jnp
import pytest

from mtp_jax import LLM, SamplingParams
from mtp_jax.api.probe import PROMPTS
from mtp_jax.decode.keys import TreeShape
from mtp_jax.decode.windows import Windows

CHAINS, TREES = (3, 7), ("2x3x7", "3x3x7", "4x3x7")
TOKENS = 96


def row(name: str, llm: LLM, temperature: float, moved: list[int]) -> str:
    """A line of the table. moved: the numbers of rows that steps have moved."""
    moved.clear()
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS, ignore_eos=True)
    found = [output.speculation for output in llm.generate([*PROMPTS] * 2, params)]
    jax.effects_barrier()
    steps, accepted, drafted = (sum(getattr(s, of) for s in found) for of in ("steps", "accepted", "drafted"))
    rows = sum(moved) / accepted
    return f"| {name} | {accepted / steps + 1:.2f} | {drafted / accepted:.1f} | {rows:.2f} |"


def main(temperatures: list[float]) -> None:
    """Print a table for each temperature."""
    moved: list[int] = []
    move = Windows._moved

    def counted(self: Windows, state, path, count):
        index = jnp.arange(path.shape[1])
        jax.debug.callback(
            lambda n: moved.append(int(n)), jnp.sum((index < count[:, None]) & (path != index))
        )
        return move(self, state, path, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Windows, "_moved", counted)
        for temperature in temperatures:
            figures = "tokens per step | nodes per accepted draft | rows moved per accepted draft"
            print(f"\n| temperature {temperature:g} | {figures} |")
            print("| --- | ---: | ---: | ---: |")
            for depth in CHAINS:
                llm = LLM(num_speculative_tokens=depth, verifier="coupled", draft_vocab=0)
                print(row(f"chain of {depth}, {depth} passes", llm, temperature, moved), flush=True)
            for tree in TREES:
                name = f"tree {tree}, {TreeShape.of(tree).steps} passes"
                print(row(name, LLM(tree=tree, draft_vocab=0), temperature, moved), flush=True)


if __name__ == "__main__":
    main([float(text) for text in sys.argv[1:]])
