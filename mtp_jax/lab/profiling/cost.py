"""Costs of a program as XLA counts them.

XLA counts the body of a loop once for any number of rounds, so its figures leave most experts out; and it
counts an operand once for each of its readers. ``bench.cost`` counts from the model instead.
"""

from jax.stages import Compiled


def by_xla(program: Compiled) -> dict[str, float]:
    """FLOPs and bytes as XLA counts them; empty where the backend gives none."""
    found = program.cost_analysis() or {}
    return {name: found[name] for name in ("flops", "bytes accessed", "transcendentals") if name in found}


def memory(program: Compiled) -> dict[str, int]:
    """Bytes of a program's arguments, outputs, aliased buffers, temporaries and code; empty where unknown."""
    found = program.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    return {} if found is None else {k: getattr(found, f"{k}_size_in_bytes") for k in kinds}
