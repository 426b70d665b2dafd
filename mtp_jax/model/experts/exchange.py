"""The exchange: rows travel to experts on other data shards, and sums travel back (docs/scaling.md).

    all_gather    every shard takes the rows of all, and returns a sum for each
    all_to_all    a row goes once to each domain of shards that has one of its experts; one sum comes back

An all-to-all needs a fixed room for each pair. Where a pair has more rows than room, every device takes the
gather (``lax.cond`` of one number that is the same everywhere), so that no row is ever dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from mtp_jax.errors import ConfigError
from mtp_jax.model.choices import ExchangeChoice
from mtp_jax.model.config import ModelConfig

RowTree = Any
"""A tree of arrays whose first axis is rows."""
RunExperts = Callable[[RowTree, Int[Array, "R k"], Float[Array, "R k"]], Float[Array, "R D"]]
"""The weighted sum of a device's own experts for each row; ids of other experts contribute nothing."""


@dataclass(frozen=True)
class Exchange:
    """An all-to-all between domains of data shards, a gather within each.

    Attributes:
        shards: number of data shards in all.
        domain: number of neighbouring data shards in a domain; 1: each shard is a domain.
        room: ratio of the rows that a pair of domains has room for to the mean of choices that are spread
            evenly.
    """

    shards: int
    domain: int
    room: float

    @property
    def domains(self) -> int:
        """Number of domains."""
        return self.shards // self.domain

    def capacity(self, rows: int, cfg: ModelConfig, neighbours: bool) -> int:
        """Number of rows that a data shard can send to one domain, out of the ``rows`` that it has.

        It is ``room`` times the mean and three standard deviations, because a small number of rows is spread
        less evenly. neighbours: whether experts of a group are neighbours.
        """
        mean = rows * reached(cfg, self.domains, neighbours) / self.domains
        return min(rows, math.ceil(self.room * mean + 3 * math.sqrt(mean)))

    @property
    def _across(self) -> list[list[int]]:
        return [[d * self.domain + i for d in range(self.domains)] for i in range(self.domain)]

    @property
    def _within(self) -> list[list[int]]:
        return [[d * self.domain + i for i in range(self.domain)] for d in range(self.domains)]

    def wanted(self, ids: Int[Array, "T k"], experts: int) -> Bool[Array, "T domains"]:
        """The domains that hold an expert of each row. experts: number in a domain; ids outside have none."""
        to = jnp.where(ids >= 0, ids // experts, self.domains)
        rows = jnp.arange(len(ids))[:, None]
        return jnp.zeros((len(ids), self.domains), bool).at[rows, to].set(True, mode="drop")

    def by_all_to_all(
        self,
        rows: RowTree,
        ids: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        wanted: Bool[Array, "T domains"],
        capacity: int,
        run: RunExperts,
    ) -> Float[Array, "T D"]:
        """The sum over the experts of each own row; rows past the capacity are left out.

        The caller sums over the devices of one data shard.
        """
        count = len(ids)
        # [domain, place in its room] -> the row that is sent; ``count`` where there is none.
        place = jnp.where(wanted, jnp.cumsum(wanted, axis=0) - 1, capacity)
        domain, row = jnp.arange(self.domains)[None], jnp.arange(count, dtype=jnp.int32)[:, None]
        sent = jnp.full((self.domains, capacity), count, jnp.int32)
        sent = sent.at[domain, place].set(jnp.broadcast_to(row, place.shape), mode="drop")

        def there(a: jax.Array) -> jax.Array:
            a = jax.lax.all_to_all(self._taken(a, sent), "data", 0, 0, axis_index_groups=self._across)
            a = a.reshape(-1, *a.shape[2:])
            return self._gathered(a)

        # A place that no row takes names no expert.
        rows, ids, weights = _sent((rows, ids + 1, weights), there)
        y = run(rows, ids - 1, weights)
        if self.domain > 1:
            groups = self._within
            y = jax.lax.psum_scatter(y, "data", tiled=True, axis_index_groups=groups)
        y = y.reshape(self.domains, capacity, -1)
        y = jax.lax.all_to_all(y, "data", 0, 0, axis_index_groups=self._across)
        total = jnp.zeros((count, y.shape[-1]), jnp.float32)
        return total.at[sent].add(y.astype(jnp.float32), mode="drop").astype(y.dtype)

    def _gathered(self, a: jax.Array) -> jax.Array:
        if self.domain == 1:
            return a
        return jax.lax.all_gather(a, "data", tiled=True, axis_index_groups=self._within)

    @staticmethod
    def _taken(a: jax.Array, rows: Int[Array, "d n"]) -> jax.Array:
        """The rows of these numbers; zeros past the last row."""
        return a.at[rows].get(mode="fill", fill_value=0)


def by_gather(
    run: RunExperts, rows: RowTree, ids: Int[Array, "T k"], weights: Float[Array, "T k"]
) -> Float[Array, "T D"]:
    """The sum over experts, by a gather of all rows and a sum of all results."""

    def there(a: jax.Array) -> jax.Array:
        return jax.lax.all_gather(a, "data", tiled=True)

    y = run(*_sent((rows, ids, weights), there))
    return jax.lax.psum_scatter(y, "data", tiled=True)


def _sent(tree: Any, there: Callable[[jax.Array], jax.Array]) -> Any:
    """The tree, each array [rows, n] of any type, after ``there``: they travel as one array of words."""
    leaves, whole = jax.tree.flatten(tree)
    words = [_words(a) for a in leaves]
    ends = np.cumsum([w.shape[1] for w in words])
    parts = jnp.split(there(jnp.concatenate(words, axis=1)), ends[:-1], axis=1)
    return whole.unflatten([_of_words(w, a.dtype) for w, a in zip(parts, leaves, strict=True)])


def _words(a: Shaped[Array, "R n"]) -> Int[Array, "R words"]:
    in_word = 4 // a.dtype.itemsize
    split = a if in_word == 1 else a.reshape(len(a), -1, in_word)
    return jax.lax.bitcast_convert_type(split, jnp.int32)


def _of_words(words: Int[Array, "R words"], dtype: Any) -> Shaped[Array, "R n"]:
    return jax.lax.bitcast_convert_type(words, dtype).reshape(len(words), -1)


def reached(cfg: ModelConfig, domains: int, neighbours: bool) -> float:
    """Domains that the experts of a row lie in, on the average, if all experts are chosen equally often.

    Experts come from ``topk_group`` groups; if these are neighbours, few domains can be reached.
    """
    within = max(cfg.topk_group, cfg.topk_group * domains // cfg.n_group)
    can_be = min(domains, within) if neighbours else domains
    return can_be * (1 - (1 - 1 / can_be) ** cfg.num_experts_per_tok)


def exchange_of(choice: ExchangeChoice, room: float, mesh: Mesh | None) -> Exchange | None:
    """The exchange that an option names; None: a gather of all rows.

    "auto": an all-to-all between hosts and a gather within each, and a gather alone on one host. Raises
    ConfigError.
    """
    if choice == "all_to_all" and (mesh is None or mesh.shape["data"] == 1):
        shape = "no mesh" if mesh is None else f"mesh {dict(mesh.shape)}"
        raise ConfigError(
            f"expert_exchange = 'all_to_all' with {shape}: rows are not split, so there is nothing to "
            "exchange; give a mesh whose data axis is 2 or more, or expert_exchange='auto'"
        )
    if mesh is None or choice == "gather":
        return None
    shards = mesh.shape["data"]
    domain = 1 if choice == "all_to_all" else shards_of_a_host(mesh.devices)
    return None if domain == shards else Exchange(shards, domain, room)


def shards_of_a_host(devices: np.ndarray) -> int:
    """Number of neighbouring data shards on one host, of devices [data, model]; 1 if hosts differ.

    A host here is a process, whose devices a fast network connects.
    """
    hosts = np.array([[d.process_index for d in shard] for shard in devices])
    first, shards = hosts[:, 0], len(hosts)
    if len({*hosts.flat}) == 1:
        return shards
    size = shards // len({*first.tolist()})
    alike = size * len({*first.tolist()}) == shards and (hosts == first[:, None]).all()
    together = alike and all(len({*first[i : i + size].tolist()}) == 1 for i in range(0, shards, size))
    return size if together else 1
