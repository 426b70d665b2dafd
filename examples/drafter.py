"""A drafter of one's own: it drafts the token that last followed the newest one, and goes on from there.

It has no parameters. The verifier keeps the law of the output under any drafts. On the command line, with
this folder in PYTHONPATH: `mtp-jax chat --drafter drafter:Follower`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mtp_jax import LLM, SamplingParams
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.keys import Origin
from mtp_jax.decode.state import DrafterState
from mtp_jax.model import ModelConfig

PROMPT = "def one(x): return f(x)\ndef two(x): return f(x)\ndef three(x): return f(x)\ndef"


@dataclass(frozen=True)
class Follower:
    """Each slot keeps its last token, and the token after each token. See ``Drafter`` in ``protocol.py``."""

    model: ModelConfig
    features: tuple[int, ...] = ()  # no hidden state of the trunk is read
    deferral: int = 0

    def empty(self, shape, pages):
        """(The last token, the token after each token) of every slot; nothing lies in pages."""
        table = jnp.zeros((shape.slots, self.model.vocab_size), jnp.int32)
        return DrafterState((table[:, 0], table), ())

    def propose(self, params, own, s, rules, on):
        """Go from token to token; where a step samples, the distribution of each draft is a point mass."""
        token, drafts = s.newest, []
        for _ in range(rules.depth):
            token = jnp.take_along_axis(own.slots[1], token[:, None], axis=1)[:, 0]
            drafts.append(token)
        tokens, count = jnp.stack(drafts, axis=1), jnp.full_like(token, rules.wanted)
        probs = None if rules.drafting is None else jax.nn.one_hot(tokens, self.model.vocab_size)
        return Drafts(tokens, count, jnp.full_like(count, Origin.OTHER), None, probs), own

    def observe(self, params, own, seen, on):
        """Enter the first ``seen.count`` tokens of each row, which are part of its sequence now."""
        last, table = own.slots
        row, number = jnp.arange(len(last))[:, None], jnp.arange(seen.tokens.shape[1])
        before = jnp.concatenate([last[:, None], seen.tokens[:, :-1]], axis=1)
        before = jnp.where(number < seen.count[:, None], before, self.model.vocab_size)  # which is no token
        table = table.at[row, before].set(seen.tokens, mode="drop")
        return own.replace(slots=(seen.last(seen.tokens, last), table))

    def flush(self, params, own, s, on):
        """Nothing was deferred."""
        return own

    def resume(self, own, slot, page):
        """Forget the sequence that had the slot before."""
        return own.replace(slots=jax.tree.map(lambda a: a.at[slot].set(0), own.slots))


def main(llm: LLM | None = None, max_tokens: int = 48):
    """Complete a text that repeats itself, and show the drafts that were kept."""
    llm = llm or LLM(drafter=Follower)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=max_tokens))
    print(PROMPT + output.outputs[0].text)
    own = output.speculation.of(Origin.OTHER)
    print(f"{own.acceptance_length:.2f} tokens per step; {own.accepted} of {own.drafted} drafts were kept")
    return output


if __name__ == "__main__":
    main()
