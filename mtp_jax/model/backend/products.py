"""Operations of a backend that kinds of attention use."""

from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.mla import Form, Queries
from mtp_jax.model.narrow import ByHead


@runtime_checkable
class Products(Protocol):
    """Products, and attention over rows in MLA's forms; see ``Xla``, which computes them."""

    @property
    def form(self) -> Form:
        """MLA form of a pass without a cache."""
        ...

    def linear(self, x: Any, w: Any, *, split: Literal["out", "in"] | None = None) -> Float[Array, "..."]:
        """``x @ w.T``."""
        ...

    def exactly(self, x: Any, w: Float[Array, "o i"]) -> Float[Array, "*b o"]:
        """``x @ w.T`` in float32, as exactly as the device can."""
        ...

    def by_head(self, w: ByHead) -> ByHead:
        """Matrices of heads as attention multiplies them."""
        ...

    def attend_rows(
        self,
        q: Queries,
        k_up: Any,
        v_up: Any,
        rows: Float[Array, "B L c"],
        mask: Bool[Array, "B W L"],
        scale: float,
        form: Form,
    ) -> Float[Array, "B W N v"]:
        """Attention over rows at hand."""
        ...

    def attend_chosen(
        self,
        q: Queries,
        k_up: Any,
        v_up: Any,
        cache: LayerCache,
        view: PagedView,
        scale: float,
        chosen: Int[Array, "B W K"] | None,
    ) -> Float[Array, "B W N v"]:
        """Attention over the rows of pages that tokens chose; None: over all that they see."""
        ...
