"""Between the KV cache and a file, without processes: what is refused, and that nothing half-right is ever found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_mp.errors import SessionError
from colibri_mp.kernels.delta_net import DeltaStates
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.paged_cache import BLOCK_TOKENS
from colibri_mp.kernels.state_memory import StateMemory
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.scheduler import Scheduler
from colibri_mp.session_store import SessionStore
from colibri_mp.specs import DeltaNetSpec

IDENTITY: dict[str, Any] = {"fingerprint": "f00d", "planes": 3}
TOKENS = list(range(3 * BLOCK_TOKENS))


class Side:
    """A cache with its bookkeeping and a store over both."""

    def __init__(
        self, identity: dict[str, Any] = IDENTITY, head_dim: int = 16, root: str | None = "root", num_slots: int = 0
    ) -> None:
        self.kv = KVCache(2, 5, 3, head_dim)
        self.scheduler = Scheduler(BlockAllocator(5, BLOCK_TOKENS), 8, None, root, num_state_slots=num_slots)
        self.allocator, self.prefix = self.scheduler.allocator, self.scheduler.prefix
        spec = DeltaNetSpec(16, 1, 1, 16, 16, 4, 1e-6)
        self.states = StateMemory([DeltaStates(spec, 2, num_slots)] if num_slots else [])
        self.store = SessionStore(self.kv, self.states, self.scheduler, identity)

    def find(self) -> list[int]:
        """The blocks that are cached for TOKENS."""
        keys: list[bytes] = []
        assert self.prefix.keys is not None
        self.prefix.keys.extend(keys, TOKENS, 3)
        return self.allocator.find(keys)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Side]:
    """A file with TOKENS, and the side that it comes from."""
    side = Side()
    keys: list[bytes] = []
    assert side.prefix.keys is not None
    side.prefix.keys.extend(keys, TOKENS, 3)
    blocks, _ = side.allocator.acquire(len(TOKENS)) or ([], 0)
    side.kv.tiles[:] = np.random.default_rng(1).standard_normal(side.kv.tiles.shape)
    for idx, key in enumerate(keys):
        side.allocator.publish(blocks, idx, key)
    side.allocator.release(blocks)
    assert side.store.save(1, [*TOKENS, 5], tmp_path / "session").num_tokens == len(TOKENS)
    return tmp_path / "session", side


def test_blocks_come_back_bit_for_bit(saved: tuple[Path, Side]) -> None:
    """Each block of the restored chain holds the bytes that were saved, whatever its id."""
    path, before = saved
    after = Side()
    held, _ = after.allocator.acquire(BLOCK_TOKENS) or ([], 0)
    assert after.store.restore(1, path).num_tokens == len(TOKENS)
    assert after.find() != before.find()
    np.testing.assert_array_equal(after.kv.tiles[:, after.find()], before.kv.tiles[:, before.find()])
    after.allocator.check_integrity([held])


@pytest.mark.parametrize(
    ("side", "what"),
    [
        (Side({**IDENTITY, "fingerprint": "beef"}), "another fingerprint"),
        (Side({**IDENTITY, "planes": 1}), "another planes"),
        (Side({**IDENTITY, "kv_bits": 8}), "another kv_bits"),
        (Side(head_dim=32), "blocks"),
        (Side(root=None), "--prefix-cache"),
    ],
)
def test_foreign_files_are_refused(saved: tuple[Path, Side], side: Side, what: str) -> None:
    """Another model, setting or shape, or nothing kept at all: a named error, and no block is taken."""
    with pytest.raises(SessionError, match=what):
        side.store.restore(1, saved[0])
    assert side.allocator.num_cached == 0
    side.allocator.check_integrity([])


def test_a_damaged_file_is_found_by_nobody(saved: tuple[Path, Side]) -> None:
    """A byte that is wrong at the end of the file: what has been read before it is not cached."""
    path, _ = saved
    content = bytearray(path.read_bytes())
    content[-30] ^= 4
    path.write_bytes(content)
    side = Side()
    with pytest.raises(SessionError, match="checksum"):
        side.store.restore(1, path)
    assert side.find() == []
    assert side.allocator.num_free == 5
    side.allocator.check_integrity([])


def test_what_is_there_already_stays_and_what_fits_is_added(saved: tuple[Path, Side]) -> None:
    """With memory for two of three blocks the first two are cached; restored again later, the third joins them."""
    side = Side()
    held, _ = side.allocator.acquire(3 * BLOCK_TOKENS) or ([], 0)
    assert side.store.restore(1, saved[0]).num_tokens == 2 * BLOCK_TOKENS
    first = side.find()
    side.allocator.release(held)
    assert side.store.restore(1, saved[0]).num_tokens == len(TOKENS)
    assert side.find()[:2] == first
    side.allocator.check_integrity([])


def test_the_state_goes_with_the_blocks(tmp_path: Path) -> None:
    """A file goes as far as a state was kept; where there is no slot for its state, or no room for all blocks, nothing is restored."""
    before = Side(num_slots=2)
    keys: list[bytes] = []
    assert before.prefix.keys is not None
    before.prefix.keys.extend(keys, TOKENS, 3)
    blocks, _ = before.allocator.acquire(len(TOKENS)) or ([], 0)
    for idx, key in enumerate(keys):
        before.allocator.publish(blocks, idx, key)
    slots, random = before.scheduler.states.slots, np.random.default_rng(1)
    before.states.set_slot(0, random.integers(0, 100, before.states.slot_bytes, np.uint8))
    assert before.store.save(1, TOKENS, tmp_path / "nothing").num_tokens == 0
    assert slots.take() == 0
    slots.keep(0, keys[1])
    assert before.store.save(1, TOKENS, tmp_path / "session").num_tokens == 2 * BLOCK_TOKENS

    after = Side(num_slots=2)
    held, _ = after.allocator.acquire(4 * BLOCK_TOKENS) or ([], 0)
    assert after.store.restore(1, tmp_path / "session").num_tokens == 0
    after.allocator.release(held)
    assert [after.scheduler.states.slots.take() for _ in range(2)] == [0, 1]
    assert after.store.restore(1, tmp_path / "session").num_tokens == 0
    after.scheduler.states.slots.release(1)
    assert after.store.restore(1, tmp_path / "session").num_tokens == 2 * BLOCK_TOKENS
    assert after.store.restore(1, tmp_path / "nothing").num_tokens == 0
    assert after.scheduler.states.slots.slot_of(keys[1]) == 1
    np.testing.assert_array_equal(after.states.copy_slot(1), before.states.copy_slot(0))
    with pytest.raises(SessionError, match="state in the session file"):
        Side().store.restore(1, tmp_path / "session")
    after.scheduler.states.slots.check_integrity([0], [])
