"""Types of a JSON object that was parsed and is not checked yet, or is about to be written."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""The values are of any type: code that reads a key checks its value, or has had it checked. A recursive type
would make every reader check it again.
"""

JsonMapping = Mapping[str, Any]
"""The same, to be read alone."""
