import ctypes
from unittest.mock import Mock, call, patch

import pytest

import contrastive_zoo as cz
from tests.interpreter import python

HELD = """
import torch, contrastive_zoo as cz
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
is_glibc = cz.engine.keep_freed_memory()
before, tiles = resident(), [torch.ones(2**20) for _ in range(32)]
tiles.clear()
print(is_glibc, resident() - before > 2**26)
"""


def test_freed_tiles_stay_in_the_process() -> None:
    ran = python("-c", HELD)
    assert ran.stdout.strip() == "True True", ran.stderr


def test_the_size_is_the_user_s() -> None:
    libc = Mock(**{"mallopt.return_value": 1})
    with patch.object(ctypes, "CDLL", return_value=libc):
        assert cz.engine.keep_freed_memory(7)
    trim_threshold, mmap_threshold, more_than_a_tile = -1, -3, 5 * 2**20
    assert libc.mallopt.mock_calls == [call(mmap_threshold, more_than_a_tile), call(trim_threshold, 7)]


@pytest.mark.parametrize("size", [-1, 2**31])
def test_a_size_that_malloc_cannot_take_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"keep_freed_memory: size is .* got {size}\."):
        cz.engine.keep_freed_memory(size)
