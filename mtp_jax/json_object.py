"""Types of a JSON object that was parsed and is not checked yet, or is about to be written; its numbers."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

JsonObject = dict[str, Any]
"""The values are of any type: code that reads a key checks its value, or has had it checked. A recursive type
would make every reader check it again.
"""

JsonMapping = Mapping[str, Any]
"""The same, to be read alone."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number that a float can hold; JSON has longer numbers, and NaN."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max
