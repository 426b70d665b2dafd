"""Names of the choices that a backend is made by. No jax here: the options of an engine have them, too."""

from typing import Literal

KernelChoice = Literal["auto", "xla", "mosaic_gpu"]
"""Where there is one for the device and the shapes, none, or nothing else: see ``model.backend.backend``."""

ExchangeChoice = Literal["auto", "gather", "all_to_all"]
"""The way of rows to the experts of other data shards: see ``experts.exchange.exchange_of``."""
