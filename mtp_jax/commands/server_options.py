"""Options of servers, in one process or on Ray."""

import argparse
import os

from mtp_jax.commands.options import chosen, given, model_options, served_name
from mtp_jax.errors import ConfigError
from mtp_jax.options import check_company
from serve.base.settings import Settings

KEY_VARIABLE, _ADMIN_KEY_VARIABLE = "MTP_JAX_API_KEY", "MTP_JAX_ADMIN_KEY"
SLOTS = 8
"""``max_num_seqs`` of a server, unless its operator gives another."""


def settings_of(args: argparse.Namespace) -> Settings:
    """The server's settings. Raises ConfigError."""
    name, admin_key = served_name(args), os.environ.get(_ADMIN_KEY_VARIABLE)
    keys = given(args, Settings).get("api_keys", ())
    keys = (*keys, *filter(None, [os.environ.get(KEY_VARIABLE)]))
    settings = chosen(args, Settings, ["api_keys"], model_names=name, admin_key=admin_key, api_keys=keys)
    check_company(ConfigError, settings, model_options(args))
    return settings


def address_of(settings: Settings, port: int) -> str:
    """The URL of the server."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{settings.scheme}://{host}:{port}"
