"""Everything that determines the programs of this process, as named facts, found without tracing one.

Two processes with the same facts would compile the same programs; processes that would compile the same may
still differ in one, which costs a compilation. So an object whose meaning a digest cannot hold is an error,
``Unknown``: a class from outside of these packages, whose source no version names, or a closure.
"""

import dataclasses
import enum
import hashlib
import os
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mtp_jax.machine import program_folder

_OURS = frozenset({"mtp_jax", "kernels_pallas"})
# Packages and modules of `mtp_jax` that trace programs, with all that they import from it.
TRACING = frozenset({
    "decode", "errors", "foreign", "heads", "json_object", "machine", "model", "options", "spread",
})  # fmt: skip
# Their code is named by a version.
_VERSIONED = _OURS | sys.stdlib_module_names - {"__main__", "unittest"} | {
    "flax", "jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy"
}  # fmt: skip
_CONSTANTS = (bool, int, float, str, bytes, tuple, frozenset)
_INNER = ("fget", "func", "__func__")
_ENVIRONMENT = ("XLA_", "TF_XLA_", "TF_CUDNN_", "TF_CUBLAS_", "TF_ENABLE_", "TF_DISABLE_", "LIBTPU_", "CUDA_")
# They say how much memory a process takes, and which devices it sees; neither changes a program.
_NO_FACTS = ("XLA_PYTHON_CLIENT_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# Options of jax that say where programs lie, or which devices there are: a fact is which run.
_ELSEWHERE = (
    "jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache",
    "jax_platforms", "jax_num_cpu_devices",
)  # fmt: skip
# Packages with a compiler for other devices than processors.
_COMPILERS = ("jax-cuda13-pjrt", "jax-cuda13-plugin", "libtpu")
# Levels of dataclasses whose fields are facts of their own: the third of ``Decoding`` has the model's sizes.
_LEVELS = 3


class Unknown(TypeError):
    """Something has a part in a program, and the digest cannot hold its meaning."""


def named(devices: Sequence[Any], **subjects: Any) -> dict[str, str]:
    """The facts by name: the value where it is short, else its digest.

    devices: the devices that run the programs, which need not be here. subjects: as ``digest`` takes them;
    fields of a dataclass are facts of their own. Raises Unknown for an object that no digest can hold.
    """
    found = _environment(devices) | _code()
    for name, value in subjects.items():
        found |= _told(name, value, _LEVELS)
    return found


def digest(*facts: Any) -> str:
    """The digest of facts alone, in hexadecimal.

    facts: numbers, texts, tuples, mappings, dataclasses, classes, functions of a module, shapes of arrays.
    Anything else raises Unknown.
    """
    found = hashlib.sha256()
    _feed(found.update, facts)
    return found.hexdigest()


def _told(name: str, value: Any, levels: int) -> dict[str, str]:
    if isinstance(value, bool | int | float | str | None) and not isinstance(value, enum.Enum):
        return {name: repr(value)}
    if levels and dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {name: _name(type(value))}
        for field in dataclasses.fields(value):
            found |= _told(f"{name}.{field.name}", getattr(value, field.name), levels - 1)
        return found
    return {name: digest(value)}


def _environment(devices: Sequence[Any]) -> dict[str, str]:
    """Versions, devices, and options of jax and XLA."""
    first = devices[0]
    found = {
        "Python": sys.version,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "devices": f"{first.platform}, {first.device_kind}, {[(d.id, d.process_index) for d in devices]}",
    }
    if first.platform == "cpu":
        found["jaxlib, processor and cores"] = program_folder()
        found["platform"] = f"{first.client.platform}, {first.client.platform_version}"
    else:
        found["jaxlib"] = version("jaxlib")
        found["processor"] = platform.machine()
        found |= {name: _version(name) for name in _COMPILERS}
    set_ = ((k, v) for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT))
    environment = {k: v for k, v in set_ if not k.startswith(_NO_FACTS)}
    options = {k: repr(v) for k, v in jax.config.values.items() if not k.startswith(_ELSEWHERE)}
    mesh = jax.sharding.get_abstract_mesh()
    # The mesh around a compilation for absent devices describes them, which are a fact already.
    around = "none" if mesh.empty or mesh.abstract_device is not None else repr(mesh)
    return found | environment | options | {"mesh around": around}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


# The code of this process


def _code() -> dict[str, str]:
    """The source of these packages, and the constants of modules as they are now."""
    if changed() is not None:
        raise Unknown(f"{changed()} has changed since this process began, so its code may be another")
    return {
        "mtp-jax": _version("mtp-jax"),
        "source of mtp-jax": _source(),
        "constants": digest(*_constants()),
    }


def changed() -> Path | None:
    """A file of these packages that was written after this process had begun, None if there is none.

    Raises Unknown on a system that does not tell when it began.
    """
    began = _began()
    return next((path for path, info in _files() if info.st_ctime >= began), None)


@cache
def _source() -> str:
    found = hashlib.sha256()
    for path, _ in _files():
        _feed(found.update, (path.parts[-3:], path.read_bytes()))
    return found.hexdigest()


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    """The files with code that can trace, or that it reads, in one order."""
    kernels = find_spec("kernels_pallas")
    tops = [Path(kernels.origin).parent] if kernels and kernels.origin else []
    tops += [path for path in Path(__file__).parents[1].iterdir() if path.stem in TRACING]
    for top in sorted(tops):
        for path in (top, *sorted(top.rglob("*"))):
            if path.suffix in (".py", ".toml"):
                yield path, path.stat()


@cache
def _began() -> float:
    """When this process began, in seconds since the epoch, to 10 ms."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError, ValueError) as error:
        raise Unknown(f"this system does not say when a process began: {error}") from error
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK") - 0.01


def _constants() -> Iterator[tuple[str, str, Any]]:
    """Constants and functions of modules, of which a trial may have changed some since their import.

    Raises Unknown where something was put into a module from outside.
    """
    for name in sorted(sys.modules):
        package, _, rest = name.partition(".")
        if package == "kernels_pallas" or (package == "mtp_jax" and rest.partition(".")[0] in TRACING):
            yield from _members(name, sys.modules[name], name)


def _members(place: str, owner: object, module: str) -> Iterator[tuple[str, str, Any]]:
    """The constants and functions of a module, or of a class in it, with their place and name."""
    # Sorted, as the order of imports decides the order of a package's modules.
    for name, value in sorted(vars(owner).items(), key=itemgetter(0)):
        if name.startswith("__"):
            continue
        if isinstance(value, _CONSTANTS):
            yield place, name, value
        elif isinstance(value, type) and value.__module__ == module and owner is sys.modules[module]:
            yield from _members(f"{place}.{name}", value, module)
        else:
            # A property and a method of a class have their function behind one of these names.
            inner = next((f for n in _INNER if (f := getattr(value, n, None)) is not None), value)
            _check_origin(inner)
            yield place, name, f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', None)}"


def _check_origin(value: object) -> None:
    """Raises Unknown for a function from elsewhere."""
    module = getattr(value, "__module__", None)
    if callable(value) and isinstance(module, str) and module.partition(".")[0] not in _VERSIONED:
        raise Unknown(f"{value!r:.80} is from {module}, whose source the digest does not hold")


# Objects


def _feed(take: Callable[[bytes], object], value: Any) -> None:
    """Feed ``take`` with bytes that no other value has."""
    parts = _parts(value)
    if isinstance(parts, bytes):
        take(f"{type(value).__name__} {len(parts)} ".encode() + parts)
        return
    take(f"{_name(type(value))} {len(parts)} ".encode())
    for part in parts:
        _feed(take, part)


def _parts(value: Any) -> bytes | tuple[Any, ...]:
    """Bytes that say all of a value beside its type, or the values that do."""
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, enum.Enum):
            return repr(value).encode()
        case bytes():
            return value
        case enum.Enum():
            return (value.name,)
        case tuple() | list():
            return tuple(value)
        case set() | frozenset():
            return tuple(sorted(map(digest, value)))
        case type() | types.FunctionType():
            return (_name(value),)
        case partial():
            return value.func, value.args, value.keywords
        case np.dtype():
            return (str(value),)
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, value.tobytes()
    return _of_jax(value)


def _of_jax(value: Any) -> tuple[Any, ...]:
    match value:
        case jax.ShapeDtypeStruct():
            return value.shape, value.dtype, value.sharding, value.weak_type, repr(value.format.layout)
        case jax.Device():
            return value.platform, value.device_kind, value.id
        case Mesh():
            return value.axis_names, repr(value.axis_types), value.devices.shape, tuple(value.devices.flat)
        case PartitionSpec():
            return (repr(value),)
        case NamedSharding():
            return value.mesh, value.spec, value.memory_kind
        case SingleDeviceSharding():
            return (*value.device_set, value.memory_kind)
        case Mapping():
            return tuple(value.items())
    if not dataclasses.is_dataclass(value):
        raise Unknown(f"{value!r:.80}, a {type(value).__name__}, is not known to the digest")
    return tuple((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))


def _name(found: Any) -> str:
    """The name under which a module has a class or a function, whose source the digest holds.

    Raises Unknown where it is made within a function, whose values the digest does not hold.
    """
    _check_origin(found)
    if isinstance(found, type) and found.__module__.partition(".")[0] not in _OURS:
        return f"{found.__module__}.{found.__qualname__}"
    try:
        known = attrgetter(found.__qualname__)(sys.modules[found.__module__])
    except AttributeError:
        known = None
    if known is not found:
        raise Unknown(f"{found!r:.80} has no name in its module")
    return f"{found.__module__}.{found.__qualname__}"
