"""The facts that all programs of an engine share."""

from dataclasses import dataclass

from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.law import Law
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import Model


@dataclass(frozen=True)
class Decoding:
    """A model, its drafter, and the choices that every program makes alike. Hashable.

    A field after the first two has the name of an attribute of ``EngineConfig``, which is its value
    (``api/local.py``).

    Attributes:
        law: says how many drafts stay, in the verifier's place, for benchmarks; None: the verifier does.
        margins: whether results have the margins of drafts.
    """

    model: Model
    drafter: Drafter
    law: Law | None = None
    margins: bool = False

    def read(self, params: Params) -> Params:
        """The parameters that the programs read: a drafter's are left out where the model has none."""
        return params if self.model.cfg.drafts else params.with_drafts()
