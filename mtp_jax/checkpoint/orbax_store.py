"""Orbax checkpoints: parameters in the engine's own shapes, restored straight to their shardings.

A folder holds config.json (the dialect of the release), ``params/`` (Orbax) and, written last,
``orbax.json``.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import PyTree

from mtp_jax.checkpoint.folder import copy_text_files, read_config
from mtp_jax.checkpoint.plan import make_plan
from mtp_jax.checkpoint.read import Loaded, Loader, OnProgress
from mtp_jax.checkpoint.write import check_no_narrow, new_folder, write_json
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.heads.kinds import head_from_json, head_to_json
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json
from mtp_jax.model.head import DraftFolder, head_of
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.params import Params, Spec, dtype_of, param_specs, type_of
from mtp_jax.model.sharding import check_divisible, param_sharding, with_auto_axes

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MARKER = "orbax.json"
_FORMAT = 1


def is_orbax(path: str | Path) -> bool:
    """Whether a folder was written by ``save``."""
    return os.path.isfile(Path(path) / MARKER)  # isfile is also False for a name that no file can have


@dataclass(frozen=True)
class OrbaxModel:
    """Contents of an Orbax folder: its model, the tree of Spec, and the dtype of its parameters."""

    config: ModelConfig
    specs: Params
    dtype: str

    def keeping(self, path: Path, num_nextn_layers: int | None) -> "OrbaxModel":
        """The contents of ``path``, with ``num_nextn_layers`` NextN layers. Raises CheckpointError."""
        present = self.config.num_nextn_predict_layers
        kept = present if num_nextn_layers is None else num_nextn_layers
        if not 0 <= kept <= present:
            raise CheckpointError(
                f"num_nextn_layers = {kept}, but {path} has {present} NextN layers; expected 0 to {present}"
            )
        if self.config.drafter and num_nextn_layers == 0:  # a server that does not draft
            return OrbaxModel(self.config.without_drafts(), self.specs.with_drafts(), self.dtype)
        specs = replace(self.specs, nextn=self.specs.nextn[:kept])
        return OrbaxModel(self.config.with_nextn(self.config.nextn_moe[:kept]), specs, self.dtype)


def check_no_draft(path: str | Path, draft_model: str | Path | DraftFolder | None) -> None:
    """Raises CheckpointError if a drafter of elsewhere is given for a folder of Orbax."""
    if beside := DraftFolder.of(draft_model):
        raise CheckpointError(
            f"{path} is an Orbax folder, which holds its own drafter: draft_model = {beside.path} "
            "has no place in it; give draft_model to `mtp-jax convert` instead"
        )


def read_about(path: Path) -> OrbaxModel:
    """Read the small files of an Orbax folder. Raises CheckpointError for another kind of folder."""
    if not is_orbax(path):
        raise CheckpointError(f"{path} has no {MARKER}; expected a folder written by `mtp-jax convert`")
    marker = read_json(path / MARKER)
    if marker.get("format") != _FORMAT or str(marker.get("dtype")) not in type_of:
        raise CheckpointError(
            f"{path / MARKER} has format {marker.get('format')!r} and dtype {marker.get('dtype')!r}; "
            f"expected {_FORMAT} and one of {', '.join(type_of)}"
        )
    cfg, _ = read_config(path)
    given = marker.get("nextn_own")
    own = [o for o in given if isinstance(o, list)] if isinstance(given, list) else []
    if own != given or len(own) != cfg.num_nextn_predict_layers:
        raise CheckpointError(
            f"{path / MARKER}: nextn_own is {given!r:.200}; expected {cfg.num_nextn_predict_layers} lists, "
            "num_nextn_predict_layers of config.json"
        )
    if head := marker.get("draft_head"):
        cfg = replace(cfg, drafter=head_from_json(head))
    specs = param_specs(cfg, [("embed" in o, "head" in o) for o in own])
    return OrbaxModel(cfg, specs, marker["dtype"])


def save(path: str | Path, cfg: ModelConfig, params: Params) -> None:
    """Write parameters, sharded or not, to a new folder. Raises CheckpointError if the folder exists.

    Narrow weights are refused: load them dequantised.
    """
    import orbax.checkpoint as ocp  # slow to import, and not needed by most runs

    path = Path(path).absolute()
    check_no_narrow(params)
    if is_orbax(path) or (path / "params").exists():
        raise CheckpointError(f"{path} already holds an Orbax checkpoint; name a new folder or remove it")
    path.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as store:
        store.save(path / "params", _flat(params))
    write_json(path / "config.json", config_json(cfg) | {"torch_dtype": _dtype_name(params)})
    own = [[name for name in ("embed", "head") if getattr(p, name) is not None] for p in params.nextn]
    head = head_of(cfg)
    kept = {"draft_head": head_to_json(head)} if head else {}
    write_json(path / MARKER, {"format": _FORMAT, "dtype": _dtype_name(params), "nextn_own": own, **kept})


def restore(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    num_nextn_layers: int | None = None,
) -> Loaded:
    """Read a folder that ``save`` wrote, every array straight to its devices.

    Args:
        path: the folder.
        mesh: devices for the parameters; None: one device. It may differ from the mesh at ``save``.
        dtype: "float32" or "bfloat16"; None keeps the saved one.
        num_nextn_layers: number of NextN layers to keep; None for all.
    Raises:
        CheckpointError: a folder that is damaged or of another kind.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    about = read_about(path)
    cfg, dtype = about.config, about.dtype if dtype is None else dtype
    if dtype not in type_of:
        raise ConfigError(f"dtype {dtype!r} is not supported; expected one of {', '.join(type_of)}")
    mesh = with_auto_axes(mesh)
    check_divisible(cfg, mesh)
    kept = about.keeping(path, num_nextn_layers)
    target = _target(mesh, dtype)
    with ocp.PyTreeCheckpointer() as store:  # the standard one cannot read a part
        try:
            stored = store.metadata(path / "params").item_metadata
            if stored is None:
                raise CheckpointError(
                    f"{path / 'params'} cannot be restored: its _METADATA is missing or damaged"
                )
            _check_stored(path, _flat(about.specs), {k: tuple(v.shape) for k, v in dict(stored).items()})
            flat = store.restore(path / "params", args=_only(_flat(jax.tree.map(target, kept.specs))))
        except CheckpointError:
            raise
        except Exception as e:  # Orbax and TensorStore raise many kinds for damaged folders
            raise CheckpointError(f"{path / 'params'} cannot be restored: {e}") from e
    params = jax.tree.structure(kept.specs).unflatten([flat[name] for name in _flat(kept.specs)])
    return Loaded(kept.config, params, sum(x.nbytes for x in jax.tree.leaves(params)))


def convert(
    model_dir: str | Path,
    out_dir: str | Path,
    draft_model: str | Path | DraftFolder | None = None,
    *,
    num_nextn_layers: int | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
    progress: OnProgress | None = None,
) -> None:
    """Load a folder in Hugging Face layout, dequantised, and write it with Orbax, tokenizer files beside it.

    num_nextn_layers: number of NextN layers to convert; None for all. Raises CheckpointError, before reading,
    if the folder to write is not empty.
    """
    out_dir = new_folder(out_dir)
    plan = make_plan(model_dir, draft_model, num_nextn_layers)
    loaded = Loader(dtype, mesh=mesh, progress=progress).load(plan)
    save(out_dir, loaded.config, loaded.params)
    copy_text_files(Path(model_dir), out_dir)


def _only(targets: dict[str, jax.ShapeDtypeStruct]) -> "ocp.args.PyTreeRestore":
    """Arguments of a reader: these arrays alone, in their dtypes and shardings."""
    import orbax.checkpoint as ocp

    given = ocp.checkpoint_utils.construct_restore_args(targets)
    return ocp.args.PyTreeRestore(item=targets, restore_args=given, partial_restore=True)


def _flat(tree: Params) -> dict[str, PyTree]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _dtype_name(params: Params) -> str:
    return str(params.embed.dtype)


def _target(mesh: Mesh | None, dtype: str) -> Callable[[Spec], jax.ShapeDtypeStruct]:
    device = next(iter(jnp.zeros(()).devices()))

    def target(spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = SingleDeviceSharding(device) if mesh is None else param_sharding(spec, mesh)
        return jax.ShapeDtypeStruct(spec.shape, dtype_of(spec, dtype), sharding=sharding)

    return target


def _check_stored(path: Path, specs: dict[str, Spec], stored: dict[str, tuple[int, ...]]) -> None:
    if specs.keys() != stored.keys():
        missing, unexpected = sorted(specs.keys() - stored.keys()), sorted(stored.keys() - specs.keys())
        raise CheckpointError(
            f"{path / 'params'} does not match config.json: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}"
        )
    for name, spec in specs.items():
        if stored[name] != spec.shape:
            raise CheckpointError(
                f"{path / 'params'}: array {name} has shape {list(stored[name])}; expected "
                f"{list(spec.shape)} from config.json"
            )
