import subprocess
import sys

from mtp_jax.api.memory import room_for_programs


def test_there_is_room_until_a_share_of_the_limit_is_taken():
    assert room_for_programs()
    assert not room_for_programs(1e-6)


IN_PIECES = """
from mtp_jax.api.memory import mappings, resident_bytes, return_free_memory

before = resident_bytes()
pieces = [bytearray(32 * 1024) for _ in range(4096)]
held = resident_bytes()
assert held > before + 100 * 2**20, (before, held)
kept = pieces[::512]  # scattered, so that the heap cannot simply end earlier
del pieces
return_free_memory()
assert resident_bytes() < held - 100 * 2**20, (held, resident_bytes())
assert len(kept) == 8
assert mappings() > 10
"""


def test_memory_is_counted_and_given_back():
    """In many pieces, which the allocator keeps when they are freed; before, nothing is free."""
    done = subprocess.run([sys.executable, "-c", IN_PIECES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
