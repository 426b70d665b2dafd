"""Files to parameters and back: Hugging Face folders, FP8 blocks, NextN draft folders, Orbax."""

from mtp_jax.checkpoint.read import Loaded, load_folder

load = load_folder

__all__ = ["Loaded", "load"]
