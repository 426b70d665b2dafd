"""Files to parameters and back: Hugging Face folders, narrow weights, NextN draft folders, Orbax."""

from pathlib import Path
from typing import Literal, get_args

from jax.sharding import Mesh

from mtp_jax.checkpoint.formats import FOUR_BITS, FP8_BY_HEAD, STORED
from mtp_jax.checkpoint.orbax_store import check_no_draft, convert, is_orbax, restore, save
from mtp_jax.checkpoint.plan import make_plan
from mtp_jax.checkpoint.random_weights import abstract_model, check_no_weights, random_model
from mtp_jax.checkpoint.read import Loaded, Loader, OnProgress
from mtp_jax.checkpoint.summary import Summary, summarise
from mtp_jax.checkpoint.write import export_nextn, save_checkpoint, save_drafter
from mtp_jax.errors import ConfigError
from mtp_jax.model.device import is_hopper, platform
from mtp_jax.model.family import config_of_file
from mtp_jax.model.head import DraftFolder
from mtp_jax.model.sharding import with_auto_axes

__all__ = [
    "DraftFolder",
    "Loaded",
    "NarrowWeights",
    "OnProgress",
    "Summary",
    "check_no_weights",
    "convert",
    "export_nextn",
    "formats_kept",
    "is_orbax",
    "load",
    "make_random",
    "restore",
    "save",
    "save_checkpoint",
    "save_drafter",
    "summarise",
]

NarrowWeights = Literal["dequantise", "keep", "multiplied"]


def load(
    model_dir: str | Path,
    draft_model: str | Path | DraftFolder | None = None,
    *,
    dtype: str = "float32",
    narrow: NarrowWeights | None = None,
    mesh: Mesh | None = None,
    num_nextn_layers: int | None = None,
    progress: OnProgress | None = None,
) -> Loaded:
    """Load a model.

    Args:
        model_dir: a folder in Hugging Face layout, or a folder written by ``mtp-jax convert``.
        draft_model: a folder with the NextN layers (in place, lmsys NextN or xLLM export) or with a draft
            head; a ``DraftFolder`` also says whether a head's list of taps counts "outputs" of the trunk's
            layers or "inputs", in place of outputs if it begins with 1, as SGLang and vLLM read it. None: the
            layers of ``model_dir``.
        dtype: "float32" or "bfloat16", of everything but norms and routers, which are float32.
        narrow: "keep": weights in FP8, FP4 or int4, and for float32 weights in bfloat16, stay so in memory
            (``model.narrow``); "dequantise": they become ``dtype``; "multiplied": weights stay that the
            device multiplies best as they are, FP8 for bfloat16 on a Hopper GPU, FP8 and bfloat16 for float32
            on a CPU without a mesh, and FP4 and int4, which are a quarter of bfloat16's bytes, everywhere;
            None: so, but on a CPU only FP4 and int4, as arrays are easier to work with. An Orbax folder holds
            none.
        mesh: devices to place the parameters on; each device reads only its part. None: one device.
        num_nextn_layers: number of NextN layers to load; None for all.
        progress: called with (bytes read, bytes to read) after every array.
    Raises:
        ConfigError: an unsupported model, or one that does not divide over the mesh.
        CheckpointError: files that are damaged, incomplete or of another model.
    """
    if narrow not in (None, *get_args(NarrowWeights)):
        raise ConfigError(
            f"narrow = {narrow!r}; expected one of {', '.join(get_args(NarrowWeights))}, or None"
        )
    mesh = with_auto_axes(mesh)
    keep = formats_kept(dtype, narrow, mesh)
    if not is_orbax(model_dir):
        return Loader(dtype, keep, mesh, progress).load(make_plan(model_dir, draft_model, num_nextn_layers))
    check_no_draft(model_dir, draft_model)
    loaded = restore(model_dir, mesh, dtype, num_nextn_layers)
    if progress:
        progress(loaded.bytes_read, loaded.bytes_read)
    return loaded


def make_random(
    model_dir: str | Path,
    *,
    dtype: str = "float32",
    narrow: NarrowWeights | None = None,
    mesh: Mesh | None = None,
    num_nextn_layers: int | None = None,
    abstract: bool = False,
) -> Loaded:
    """Make random weights in the place of a model's, with the sizes and types that config.json announces.

    Devices make them, each its part; equal meshes have equal weights. abstract: make their shapes alone. See
    ``load`` for the other arguments. Raises ConfigError.
    """
    mesh = with_auto_axes(mesh)
    cfg = config_of_file(Path(model_dir) / "config.json")
    make = abstract_model if abstract else random_model
    return make(cfg, dtype, formats_kept(dtype, narrow, mesh), mesh, num_nextn_layers)


def formats_kept(dtype: str, narrow: NarrowWeights | None = None, mesh: Mesh | None = None) -> frozenset[str]:
    """Names of the ways of storing (``formats.STORED``) in which weights stay in memory; see ``load``."""
    keep = frozenset(s.name for s in STORED) - ({"bf16"} if dtype == "bfloat16" else set())
    if narrow == "dequantise":
        return frozenset()
    on_gpu = dtype == "bfloat16" and is_hopper()
    on_cpu = narrow == "multiplied" and dtype == "float32" and platform() == "cpu" and mesh is None
    if on_cpu:
        return keep
    return keep - {FP8_BY_HEAD.name} if narrow == "keep" or on_gpu else FOUR_BITS
