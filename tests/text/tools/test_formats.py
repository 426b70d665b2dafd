"""Formats of calls have names; an unknown one is refused with the list of them."""

import pytest

from mtp_jax.errors import RequestError
from mtp_jax.text.tools.formats import FORMATS, format_named


def test_known_names_and_an_unknown_one():
    assert format_named("glm47") is FORMATS["glm47"]
    with pytest.raises(RequestError, match=r"'glm'.*deepseek_v3, .*glm47, json, kimi_k2"):
        format_named("glm")
