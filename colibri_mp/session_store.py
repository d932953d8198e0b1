"""Sessions between the KV cache and files: `save` writes what is cached for some content, `restore` brings it back.

Nothing is computed. What is restored is cached and held by nobody: the next request that begins with this content takes it, and it
is evicted as everything else. Runs in the engine's thread, between two steps or layers. Where layers have recurrent states, a file goes
as far as a state was kept, and has that state.
"""

from pathlib import Path
from typing import Any

from colibri_mp.backend import Blocks, Slots
from colibri_mp.errors import SessionError
from colibri_mp.messages import Restored, Saved
from colibri_mp.scheduler import Scheduler
from colibri_mp.session_file import NO_STATE, Bytes, SessionHead, read_session, write_session


class SessionStore:
    """`identity`: all that the values depend on beside the tokens; a file with another one is refused."""

    def __init__(self, kv: Blocks, state_memory: Slots, scheduler: Scheduler, identity: dict[str, Any]) -> None:
        self.kv, self.state_memory, self.identity = kv, state_memory, identity
        self.allocator, self.states, self._prefix = scheduler.allocator, scheduler.states, scheduler.prefix

    def save(self, request_id: int, token_ids: list[int], path: Path) -> Saved:
        """Write the blocks that are cached for the longest prefix of `token_ids`.

        Raises:
            SessionError: nothing is cached here (`--prefix-cache off`).
            WriteError: the file cannot be written.
        """
        keys = self.make_keys(token_ids)
        blocks = self.allocator.find(keys)
        del blocks[self.states.usable(keys, len(blocks)) :]
        state = NO_STATE
        if self.states.exist and blocks:
            state = self.state_memory.copy_slot(self.states.slots.slot_of(keys[len(blocks) - 1]))
        saved = token_ids[: len(blocks) * self.allocator.block_tokens]
        data = (self.kv.copy_block(block) for block in blocks)
        num_bytes = write_session(path, self.identity, saved, self.kv.block_bytes, data, state)
        return Saved(request_id, len(saved), num_bytes, len(token_ids))

    def restore(self, request_id: int, path: Path) -> Restored:
        """Cache the blocks of a file, as many of the first as there is memory for that no running request holds.

        Raises:
            SessionError: it cannot be used; says why. Nothing of it is cached then.
        """
        restoring = _Restoring(self, path)
        try:
            num_bytes = read_session(path, restoring)
            restoring.publish()
        finally:
            restoring.release()
        return Restored(request_id, restoring.num_tokens, num_bytes, restoring.num_in_file)

    def make_keys(self, token_ids: list[int]) -> list[bytes]:
        """The names of the whole blocks of some content. Raises `SessionError`: nothing is kept here."""
        keys: list[bytes] = []
        if self._prefix.keys is None:
            raise SessionError("KV is not kept between requests here; launch without --prefix-cache off")
        self._prefix.keys.extend(keys, token_ids, len(token_ids) // self.allocator.block_tokens)
        return keys


class _Restoring:
    """The blocks of one file on their way: held, and found by nobody until the whole file has proved right."""

    def __init__(self, store: SessionStore, path: Path) -> None:
        self._store, self._path = store, path
        self._keys: list[bytes] = []
        self._blocks: list[int] = []
        self._slot: int | None = None
        self._num_found = 0
        self.num_tokens = 0
        self.num_in_file = 0

    def start(self, head: SessionHead) -> None:
        """Check that the file is of this model and reserve blocks, and a slot for its state."""
        store = self._store
        self._check(head)
        self._keys, self.num_in_file = store.make_keys(head.token_ids), len(head.token_ids)
        num_holdable = store.allocator.most_holdable(self._keys)
        if store.states.exist and self._keys:
            self._slot = store.states.slots.take() if num_holdable >= len(self._keys) else None
            num_holdable = (
                num_holdable if self._slot is not None else 0
            )  # blocks without the state after them are of no use
        del self._keys[num_holdable:]
        self.num_tokens = len(self._keys) * store.allocator.block_tokens
        acquired = store.allocator.acquire(self.num_tokens, self._keys)
        assert acquired is not None
        self._blocks, self._num_found = acquired

    def _check(self, head: SessionHead) -> None:
        for name, value in self._store.identity.items():
            if head.identity.get(name) != value:
                raise SessionError(
                    f"the session file {self._path} was saved with another {name} ({head.identity.get(name)!r}) than this "
                    f"cluster has ({value!r}); its values would be wrong here"
                )
        if head.block_bytes != self._store.kv.block_bytes:
            raise SessionError(
                f"blocks of the session file {self._path} have {head.block_bytes} bytes, here {self._store.kv.block_bytes}"
            )
        wanted = self._store.state_memory.slot_bytes if head.token_ids else 0
        if head.state_bytes != wanted:
            raise SessionError(
                f"the state in the session file {self._path} has {head.state_bytes} bytes, here it would have {wanted}"
            )

    def take_block(self, idx: int, data: Bytes) -> None:
        """Into its place, unless that content is cached already."""
        if self._num_found <= idx < len(self._blocks):
            self._store.kv.set_block(self._blocks[idx], data)

    def take_state(self, data: Bytes) -> None:
        """Into the slot, if there is one."""
        if self._slot is not None:
            self._store.state_memory.set_slot(self._slot, data)

    def publish(self) -> None:
        """Let the blocks be found, and the state."""
        for idx in range(self._num_found, len(self._blocks)):
            self._store.allocator.publish(self._blocks, idx, self._keys[idx])
        if self._slot is not None:
            self._store.states.slots.keep(self._slot, self._keys[-1])
            self._slot = None

    def release(self) -> None:
        """Hold nothing any more."""
        self._store.allocator.release(self._blocks)
        if self._slot is not None:
            self._store.states.slots.release(self._slot)
            self._slot = None
