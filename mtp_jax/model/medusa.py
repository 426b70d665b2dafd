"""Medusa heads: arXiv 2401.10774, section 2.1.1.

Head k predicts the token k + 2 places behind a token from the trunk's hidden state there, after the final
norm: the logits behind the hidden state give the next token, and the heads draft the tokens behind that one.
A head knows nothing of the tokens between.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head_config import MedusaConfig
from mtp_jax.model.head_specs import Medusa
from mtp_jax.model.params import Params


@dataclass(frozen=True)
class MedusaHeads:
    """The heads of a trunk. Hashable."""

    trunk: ModelConfig

    @property
    def head(self) -> MedusaConfig:
        """Number and options of the heads."""
        assert isinstance(self.trunk.drafter, MedusaConfig), "the trunk has no Medusa heads"
        return self.trunk.drafter

    def logits(
        self, params: Params, on: Backend, hidden: Float[Array, "B W D"], k: Int[Array, ""] | int
    ) -> Float[Array, "B W V"]:
        """Logits of draft k, the first being draft 0; other heads are not computed."""
        if isinstance(k, int):
            return self._of_head(params, on, k, hidden)
        each = [partial(self._of_head, params, on, i) for i in range(self.head.heads)]
        return jax.lax.switch(k, each, hidden)

    def _of_head(
        self, params: Params, on: Backend, i: int, x: Float[Array, "B W D"]
    ) -> Float[Array, "B W V"]:
        assert isinstance(params.drafter, Medusa), "the configuration has heads, the parameters have none"
        blocks, table = params.drafter.blocks[i], params.drafter.tables[i]
        with jax.named_scope(f"medusa_{i}"):
            for block in blocks:
                y = on.products.linear(x, block.linear)
                x = x + jax.nn.silu(y if block.bias is None else y + block.bias)
            return on.products.head(x, table)
