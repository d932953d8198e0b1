"""Sharing of computed prefixes: which KV blocks a sequence takes from others, and when its own may be taken.

A block is published as soon as a step that completed it has ended, so a step that failed or was cancelled publishes nothing.
At least the last token that is known is always computed: its logits choose the next one. A sequence that wants all its
logits takes nothing.

Where layers have recurrent states, blocks can be taken only as far as a state was kept for them (`sequence_states`).
"""

from typing import TYPE_CHECKING, Any

from colibri_mp.kvcache import BlockAllocator, PrefixKeys
from colibri_mp.sequence_states import SequenceStates

if TYPE_CHECKING:
    from colibri_mp.scheduler import Sequence


class PrefixSharing:
    """The blocks of all sequences, by content; with `root` None nothing is shared. `root`: see `kvcache.PrefixKeys`."""

    def __init__(self, allocator: BlockAllocator, states: SequenceStates, root: str | None = None) -> None:
        self._allocator = allocator
        self._states = states
        self.keys = None if root is None else PrefixKeys(root, allocator.block_tokens)
        self.num_asked_tokens = 0
        self.num_taken_tokens = 0

    def admit(self, sequence: "Sequence") -> bool:
        """Reserve the sequence's blocks, the longest cached prefix first, and its state's slot; False if too few are free now."""
        keys = self._takeable(sequence)
        num_cached = len(self._allocator.find(keys))
        num_usable = self._states.usable(keys, num_cached)
        source = keys[num_usable - 1] if num_usable else None
        if not self._states.can_begin(source):
            return False
        acquired = self._allocator.acquire(sequence.projected_tokens, keys[:num_usable])
        if acquired is None:
            return False
        sequence.blocks, num_found = acquired
        self._states.begin(sequence, source)
        if self.keys is not None and not sequence.all_logits:
            self.num_asked_tokens += len(sequence.token_ids)
        self._took(sequence, num_found * self._allocator.block_tokens)
        self._keep_states(sequence, len(keys), num_cached)
        return True

    def skip_computed(self, sequence: "Sequence") -> None:
        """Take the blocks that others have computed meanwhile in place of those that the sequence would compute next."""
        keys = self._takeable(sequence)
        idx = sequence.num_computed // self._allocator.block_tokens
        if idx >= len(keys):
            return
        num_cached = idx + len(self._allocator.find(keys[idx:]))
        num_usable = self._states.usable(keys, num_cached)
        if num_usable <= idx:
            self._keep_states(sequence, num_cached)
            return
        while idx < num_usable:
            self._allocator.adopt(sequence.blocks, idx, keys[idx])
            idx += 1
        self._states.skip_to(sequence, keys[idx - 1])
        self._took(sequence, idx * self._allocator.block_tokens)

    def _keep_states(self, sequence: "Sequence", *num_blocks: int) -> None:
        """Where others may want to go on: after so many blocks."""
        for count in num_blocks:
            self._states.keep_after(sequence, count * self._allocator.block_tokens)

    def leaders(self, sequences: list["Sequence"]) -> list["Sequence"]:
        """Of those whose next block is the same, only the one that is furthest: the others take it when it is computed.

        With recurrent states: of those whose prompts are the same up to the last block, since that is where a state will be kept.
        """
        next_keys = [self._next_key(sequence) for sequence in sequences]
        furthest: dict[bytes | None, Sequence] = {}
        for key, sequence in zip(next_keys, sequences, strict=True):
            if sequence.num_computed > furthest.setdefault(key, sequence).num_computed:
                furthest[key] = sequence
        pairs = zip(next_keys, sequences, strict=True)
        return [sequence for key, sequence in pairs if key is None or furthest[key] is sequence]

    def publish(self, sequence: "Sequence") -> None:
        """Let others find the blocks that are computed to the end."""
        if self.keys is None:
            return
        num_full = sequence.num_computed // self._allocator.block_tokens
        self.keys.extend(sequence.keys, sequence.token_ids, num_full)
        for idx in range(sequence.num_published, num_full):
            self._allocator.publish(sequence.blocks, idx, sequence.keys[idx])
        sequence.num_published = num_full

    def describe(self) -> dict[str, Any]:
        """What `status` says: tokens of prompts that could be shared and were; blocks and states cached, and evicted so far."""
        return {
            "enabled": self.keys is not None,
            "asked_tokens": self.num_asked_tokens,
            "hit_tokens": self.num_taken_tokens,
            "cached_blocks": self._allocator.num_cached,
            "evicted_blocks": self._allocator.num_evicted,
            "kept_states": self._states.slots.num_kept,
            "evicted_states": self._states.slots.num_evicted,
        }

    def _takeable(self, sequence: "Sequence") -> list[bytes]:
        """Keys of the blocks that the sequence may take from others."""
        if self.keys is None or sequence.all_logits:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self._allocator.block_tokens
        self.keys.extend(sequence.keys, sequence.token_ids, num_blocks)
        return sequence.keys[:num_blocks]

    def _next_key(self, sequence: "Sequence") -> bytes | None:
        """Key of the block that the sequence computes next, if others may take it or it might be taken from them.

        With recurrent states, of the last such block.
        """
        keys, idx = self._takeable(sequence), sequence.num_computed // self._allocator.block_tokens
        if idx >= len(keys):
            return None
        return keys[-1] if self._states.exist else keys[idx]

    def _took(self, sequence: "Sequence", num_computed: int) -> None:
        """The sequence's first `num_computed` tokens are in its blocks now, without its doing."""
        taken = num_computed - sequence.num_computed
        sequence.num_computed = num_computed
        sequence.num_published = num_computed // self._allocator.block_tokens
        sequence.num_taken += taken
        self.num_taken_tokens += taken
