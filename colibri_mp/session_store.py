"""Sessions between the KV cache and files: `save` writes what is cached for some content, `restore` brings it back.

Nothing is computed. What is restored is cached and held by nobody: the next request that begins with this content takes it, and it
is evicted as everything else. Runs in the engine's thread, between two steps or layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from colibri_mp.backend import Blocks
from colibri_mp.errors import SessionError
from colibri_mp.kvcache import BlockAllocator
from colibri_mp.messages import Restored, Saved
from colibri_mp.prefix import PrefixSharing
from colibri_mp.session_file import Bytes, SessionHead, read_session, write_session


class SessionStore:
    """`identity`: all that the values depend on beside the tokens; a file with another one is refused."""

    def __init__(self, kv: Blocks, allocator: BlockAllocator, prefix: PrefixSharing, identity: dict[str, Any]) -> None:
        self._kv = kv
        self._allocator = allocator
        self._prefix = prefix
        self._identity = identity

    def save(self, request_id: int, token_ids: list[int], path: Path) -> Saved:
        """Write the blocks that are cached for the longest prefix of `token_ids`.

        Raises:
            SessionError: nothing is cached here (`--prefix-cache off`).
            WriteError: the file cannot be written.
        """
        blocks = self._allocator.find(self._keys(token_ids))
        saved = token_ids[: len(blocks) * self._allocator.block_tokens]
        data = (self._kv.copy_block(block) for block in blocks)
        num_bytes = write_session(path, self._identity, saved, self._kv.block_bytes, data)
        return Saved(request_id, len(saved), num_bytes, len(token_ids))

    def restore(self, request_id: int, path: Path) -> Restored:
        """Cache the blocks of a file, as many of the first as there is memory for that no running request holds.

        Raises:
            SessionError: it cannot be used; says why. Nothing of it is cached then.
        """
        restoring = _Restoring(self._kv, self._allocator, self._identity, self._keys, path)
        try:
            num_bytes = read_session(path, restoring.start)
            restoring.publish()
        finally:
            restoring.release()
        return Restored(request_id, restoring.num_tokens, num_bytes, restoring.num_in_file)

    def _keys(self, token_ids: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        if self._prefix.keys is None:
            raise SessionError("KV is not kept between requests here; launch without --prefix-cache off")
        self._prefix.keys.extend(keys, token_ids, len(token_ids) // self._allocator.block_tokens)
        return keys


class _Restoring:
    """The blocks of one file on their way: held, and found by nobody until the whole file has proved right."""

    def __init__(
        self, kv: Blocks, allocator: BlockAllocator, identity: dict[str, Any],
        make_keys: Callable[[list[int]], list[bytes]], path: Path,
    ) -> None:  # fmt: skip
        self._kv, self._allocator, self._identity = kv, allocator, identity
        self._make_keys, self._path = make_keys, path
        self._keys: list[bytes] = []
        self._blocks: list[int] = []
        self._num_found = 0
        self.num_tokens = 0
        self.num_in_file = 0

    def start(self, head: SessionHead) -> Callable[[int, Bytes], None]:
        """Check that the file is of this model and reserve blocks."""
        for name, value in self._identity.items():
            if head.identity.get(name) != value:
                raise SessionError(
                    f"the session file {self._path} was saved with another {name} ({head.identity.get(name)!r}) than this "
                    f"cluster has ({value!r}); its values would be wrong here"
                )
        if head.block_bytes != self._kv.block_bytes:
            raise SessionError(
                f"blocks of the session file {self._path} have {head.block_bytes} bytes, here {self._kv.block_bytes}"
            )
        self._keys, self.num_in_file = self._make_keys(head.token_ids), len(head.token_ids)
        del self._keys[self._allocator.most_holdable(self._keys) :]
        self.num_tokens = len(self._keys) * self._allocator.block_tokens
        acquired = self._allocator.acquire(self.num_tokens, self._keys)
        assert acquired is not None
        self._blocks, self._num_found = acquired
        return self._take

    def _take(self, idx: int, block: Bytes) -> None:
        if self._num_found <= idx < len(self._blocks):
            self._kv.set_block(self._blocks[idx], block)

    def publish(self) -> None:
        """Let the blocks be found."""
        for idx in range(self._num_found, len(self._blocks)):
            self._allocator.publish(self._blocks, idx, self._keys[idx])

    def release(self) -> None:
        """Hold nothing any more."""
        self._allocator.release(self._blocks)
