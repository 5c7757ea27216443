import pytest

import contrastive_zoo as cz
from tests.interpreter import python

HELD = """
import sys, torch, contrastive_zoo as cz
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
is_glibc = cz.engine.keep_freed_memory(int(sys.argv[1]))
before, tiles = resident(), [torch.ones(2**20) for _ in range(32)]
tiles.clear()
print(is_glibc, resident() - before > 2**26)
"""


@pytest.mark.parametrize(("size", "printed"), {"300000000": "True True", "0": "True False"}.items())
def test_freed_tiles_stay_in_the_process_as_far_as_the_user_says(size: str, printed: str) -> None:
    ran = python("-c", HELD, size)
    assert ran.stdout.strip() == printed, ran.stderr


@pytest.mark.parametrize("size", [-1, 2**31])
def test_a_size_that_malloc_cannot_take_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"keep_freed_memory: size is .* got {size}\."):
        cz.engine.keep_freed_memory(size)
