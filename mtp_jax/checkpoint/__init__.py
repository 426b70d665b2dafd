"""Files to parameters and back: Hugging Face folders, FP8 blocks, NextN draft folders, Orbax."""

from mtp_jax.checkpoint.read import Loaded, load_folder
from mtp_jax.checkpoint.write import export_nextn, save_checkpoint

load = load_folder

__all__ = ["Loaded", "export_nextn", "load", "save_checkpoint"]
