"""The recurrent states of a model as one: slot `i` is slot `i` of each kind of state that its layers have (`delta_inputs`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_mp.kernels.delta_inputs import DeltaStates


class StateMemory:
    """All states by slot; of a model without recurrent layers there are none, and no slots."""

    def __init__(self, states: Sequence[DeltaStates]) -> None:
        self._states = tuple(states)
        self.num_slots = min((part.num_slots for part in states), default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in all layers."""
        return sum(part.slot_bytes for part in self._states)

    def copy_slot(self, slot: int) -> NDArray[np.uint8]:
        """What a slot holds, one kind of state after the other, as uint8 [slot_bytes]."""
        return np.concatenate([part.copy_slot(slot) for part in self._states])

    def set_slot(self, slot: int, data: NDArray[np.uint8]) -> None:
        """The inverse of `copy_slot`."""
        start = 0
        for part in self._states:
            part.set_slot(slot, data[start : start + part.slot_bytes])
            start += part.slot_bytes
