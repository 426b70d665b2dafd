"""The facts that all programs of an engine share."""

from dataclasses import dataclass

from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.law import Law
from mtp_jax.model.draft_rows import with_draft_rows
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
        draft_vocab: ids of the tokens that drafts choose among; None: all.
    """

    model: Model
    drafter: Drafter
    law: Law | None = None
    margins: bool = False
    draft_vocab: tuple[int, ...] | None = None

    def read(self, params: Params) -> Params:
        """The parameters that the programs read: a drafter's are left out where the model has none.

        Raises ConfigError for a ``draft_vocab`` beside drafts with an output table of their own.
        """
        if not self.model.cfg.drafts:
            return params.with_drafts()
        ids = self.draft_vocab
        if ids is None or not params.can_draft:  # the drafter's memory may be released
            return params
        return with_draft_rows(params, ids, self.model.on.mesh)
