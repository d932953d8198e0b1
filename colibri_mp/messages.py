"""Every message between the processes, and its frames: `to_frames` and `from_frames` are inverse functions.

    frame 0   header  <4s magic "CLBR"><u16 protocol version><u16 number of array frames>, then the msgpack body
    frame 1.. arrays  raw little-endian bytes, C order; dtype and shape stand in the body

There is no pickle. A body is a tagged union of the structs below; an array field holds {dtype, shape, frame} in the body.
`Route` and `Routed` travel once a layer and token, so they have a fixed layout in a single frame instead (`_STEP`): decoding the
general form takes 0.1 ms where the code has fallen out of the processor's caches, which streaming weights sees to.
Two conversations use them:

    client  ── Generate, Score, Cancel, SaveSession, RestoreSession, GetStatus, Shutdown ──▶ coordinator
    client  ◀── Ping, Progress, PromptLogprobs, Piece, Finished, Scores, Saved, Restored, Status, Failed ── coordinator
    coordinator ── Route, Hint, Keep, Resize, Stop ──▶ worker ── Hello, Routed, PoolReport, Resized, Failed ──▶ coordinator

See docs/protocol.md. Decoded arrays are read-only views into the received frames.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from colibri_mp.errors import ProtocolError

MAGIC = b"CLBR"
VERSION = 3
STEP_MAGIC = b"CLBS"
_HEADER = struct.Struct("<4sHH")
_DTYPES = ("<f4", "<i4")

Frame: TypeAlias = bytes | memoryview
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class Array(msgspec.Struct, frozen=True):
    """An array on the wire: float32 or int32, C order. `frame` counts array frames from 0."""

    dtype: str
    shape: tuple[int, ...]
    frame: int


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen; `temperature` 0 is greedy. The defaults of a checkpoint fill in what is None.

    Ranges: temperature >= 0, 0 < top_p <= 1, top_k >= 0 (0: off), 0 <= min_p < 1, repetition_penalty in 0.01..100, presence_penalty and
    frequency_penalty in -2..2. `logit_bias` is added to the logits of the tokens named.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None


class Conversation(msgspec.Struct, frozen=True):
    """A prompt for the checkpoint's chat template.

    `messages` and `tools` have OpenAI's form and reach the template as they are: a message has a `role`, and whatever the template
    reads beside it (content, tool_calls, tool_call_id, name, reasoning_content). `template_options` are further variables of the
    template, such as enable_thinking. `add_generation_prompt`: the template adds the start of the answer.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}
    add_generation_prompt: bool = True


class Constraint(msgspec.Struct, frozen=True):
    """What an answer must be: `text` is a JSON schema, a regular expression that all of it matches, or a grammar.

    A grammar is written in llguidance's dialect of Lark; json_object is any JSON object, without a text. The answer ends where
    nothing can follow.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar"]
    text: str = ""


Prompt: TypeAlias = str | list[int] | Conversation


# -- client to coordinator --------------------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Generate up to `max_tokens` tokens after `prompt`: text, token ids, or a conversation for the chat template.

    The answer ends before a string of `stop`, a token of `stop_ids`, or (but for `ignore_eos`) a token that ends a text.
    `progress`: send `Progress` between the steps that compute the prompt. `logprobs`: say of each token how likely the model found
    it, and so many likeliest ones; `prompt_logprobs`: the same of the prompt's tokens (see `logprobs`; `max_tokens` may then be 0).
    `draft`: most tokens guessed in a step, up to what the cluster was launched with, which is also the default.
    """

    request_id: int
    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    progress: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    draft: int | None = None


class Score(msgspec.Struct, frozen=True, tag=True):
    """Teacher-forced logits of every position of every prompt; the prompts share the steps as one batch."""

    request_id: int
    prompts: list[list[int]]
    chunk: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a request of this client; it ends with `Finished(finish_reason="cancelled")` unless it has ended already."""

    request_id: int


class SaveSession(msgspec.Struct, frozen=True, tag=True):
    """Write the KV that is cached for the longest prefix of `prompt` to the file `path`, absolute; nothing is computed."""

    request_id: int
    path: str
    prompt: Prompt


class RestoreSession(msgspec.Struct, frozen=True, tag=True):
    """Cache the KV of the session file `path`, absolute, so that the next request with this content finds it."""

    request_id: int
    path: str


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for `Status`; answered at any time, in the middle of a prefill too.

    `reads_memory`: read the processes' memory now (that takes 0.1 s for some GB), rather than say what was read lately.
    """

    request_id: int
    reads_memory: bool = True


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the cluster; answered with `Status` just before the coordinator stops."""

    request_id: int


# -- coordinator to client --------------------------------------------------------------------------------------------


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Nothing, to be ignored: a client that has gone cannot be sent it (see `control`). Of no request: the id is 0."""

    request_id: int = 0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far the prompt of a `Generate` has been computed, in tokens; the first `Piece` follows when all of it has."""

    request_id: int
    num_computed: int
    num_prompt: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural logarithm of the probability that the model gave a token, and those of the likeliest, (id, logprob) each."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Logprobs of the prompt's tokens from position `start` on, None for its first; the parts come in order, before any `Piece`."""

    request_id: int
    start: int
    entries: list[TokenLogprob | None]


class Piece(msgspec.Struct, frozen=True, tag=True):
    """New tokens of a request and the text that is complete by now (whole characters; may be empty).

    `logprobs`: one for each token, if they were asked for.
    """

    request_id: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = []


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The end of a `Generate`; `text` is the rest that had been held back. `stats` as documented in `client.Completion`.

    `stopped_by`: the string of `stop` or the id of `stop_ids` that ended it, None if it was something else.
    """

    request_id: int
    finish_reason: str
    text: str
    stats: dict[str, Any]
    stopped_by: str | int | None = None


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Logits float32 [n, V] of the next n positions of one prompt of a `Score`, as they are made; nobody gathers them.

    The request has ended when every position of every prompt has come.
    """

    request_id: int
    prompt_idx: int
    logits: np.ndarray[Any, Any]


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SaveSession`: of `num_asked` tokens the first `num_tokens` are in the file of `num_bytes`."""

    request_id: int
    num_tokens: int
    num_bytes: int
    num_asked: int


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RestoreSession`: of the file's `num_in_file` tokens the first `num_tokens` are cached now."""

    request_id: int
    num_tokens: int
    num_bytes: int
    num_in_file: int


class Status(msgspec.Struct, frozen=True, tag=True):
    """What the cluster is and does: the nested dict that `status --json` prints."""

    request_id: int
    stats: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error in place of an answer. From a worker, `request_id` is the step."""

    request_id: int
    kind: str
    message: str


# -- coordinator and worker -------------------------------------------------------------------------------------------


class Route(msgspec.Struct, frozen=True):
    """Compute the experts of `layer` for a batch: x float32 [T, D], ids int32 [T, K], weights float32 [T, K]."""

    step: int
    layer: int
    x: np.ndarray[Any, Any]
    ids: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]


class Hint(msgspec.Struct, frozen=True):
    """Experts int32 [n] that `layer` will probably need soon, the likeliest first; there is no answer."""

    step: int
    layer: int
    experts: np.ndarray[Any, Any]


class StepCounters(msgspec.Struct, frozen=True):
    """What one `Route` cost a worker: experts found and read, bytes asked of the disk, seconds.

    Every expert asked for is one of `hits` (in memory), `promoted` (read ahead, or being read ahead) and `misses`.
    """

    hits: int = 0
    misses: int = 0
    promoted: int = 0
    evictions: int = 0
    bytes_read: int = 0
    disk_s: float = 0.0  # wall time in which at least one read was under way
    wait_s: float = 0.0  # wall time in which compute stood still for the disk
    compute_s: float = 0.0

    @property
    def asked(self) -> int:
        """Distinct experts that the step needed."""
        return self.hits + self.misses + self.promoted


class Routed(msgspec.Struct, frozen=True):
    """The routed sum y float32 [T, D] of a `Route`, each token's experts added in ascending id."""

    step: int
    layer: int
    y: np.ndarray[Any, Any]
    counters: StepCounters


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready: its pool is attached, its kernels are loaded. `notes`: choices it made, with reasons."""

    worker_id: int
    pid: int
    notes: tuple[str, ...] = ()


class Resize(msgspec.Struct, frozen=True, tag=True):
    """Keep the slabs of the pool within `slab_bytes` from now on; obeyed between two steps."""

    slab_bytes: int


class Resized(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Resize`: what the slabs may take now; more than was asked for where the pool's floor is above it."""

    worker_id: int
    slab_bytes: int


class Wish(msgspec.Struct, frozen=True):
    """An expert to have in memory: in a free slot of its layer, or pinned."""

    layer: int
    expert: int
    is_pinned: bool


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Read these when there is time, in this order, and let the pins of `let_go` (layer, expert) be evicted again."""

    wishes: list[Wish]
    let_go: list[tuple[int, int]] = []


class PoolEvent(msgspec.Struct, frozen=True):
    """What happened to a layer beside its steps: load, fill, pin, unpin or drop of an expert, resize to a number of slots."""

    kind: str
    layer: int
    value: int


class PoolReport(msgspec.Struct, frozen=True, tag=True):
    """What a worker says of its pool beside the steps, before the answer to the next one.

    Reads ahead since the start: `issued`, of these `promoted` (asked for; `late` while still being read), `dropped` (complete, but
    never asked for), `failed` (called off, or an error), of `wasted_bytes` in all. Misses after a hint: predicted ones that were
    not there any more, and unpredicted ones. `events` since the last report.
    """

    worker_id: int
    issued: int = 0
    promoted: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0
    wasted_bytes: int = 0
    missed_dropped: int = 0
    missed_unpredicted: int = 0
    num_pinned: int = 0
    locked_bytes: int = 0
    lock_refusal: str = ""
    num_waiting: int = 0
    refusal: str = ""
    events: list[PoolEvent] = []


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the worker."""


_General: TypeAlias = (
    Generate | Score | Cancel | SaveSession | RestoreSession | GetStatus | Shutdown
    | Ping | Progress | PromptLogprobs | Piece | Finished | Scores | Saved | Restored | Status | Failed
    | Hello | Resize | Resized | Keep | PoolReport | Stop
)  # fmt: skip
Message: TypeAlias = _General | Hint | Route | Routed


class _Codec(threading.local):
    """msgpack with the arrays moved out of the body; an instance for each thread, since its hooks keep state."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._frames: Sequence[Frame] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder = msgspec.msgpack.Decoder(_General, dec_hook=self._take)

    def _put(self, value: object) -> Array:
        if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
            raise ProtocolError(
                f"cannot send {type(value).__name__} {getattr(value, 'dtype', '')}: float32 and int32 arrays only"
            )
        self._arrays.append(np.ascontiguousarray(value))
        return Array(value.dtype.str, value.shape, len(self._arrays) - 1)

    def _take(self, _type: type, value: Any) -> np.ndarray[Any, Any]:
        array = msgspec.convert(value, Array)
        if array.dtype not in _DTYPES or array.frame >= len(self._frames):
            raise ProtocolError(f"array field {value} does not fit {len(self._frames)} array frames")
        flat = np.frombuffer(self._frames[array.frame], dtype=array.dtype)
        if any(n < 0 for n in array.shape) or flat.size != int(np.prod(array.shape, dtype=np.int64)):
            raise ProtocolError(f"array frame {array.frame} has {flat.size} values, its shape is {array.shape}")
        return flat.reshape(array.shape)

    def encode(self, message: Message) -> list[Frame]:
        self._arrays = []
        body = self._encoder.encode(message)
        header = _HEADER.pack(MAGIC, VERSION, len(self._arrays))
        return [header + body, *(a.data.cast("B") if a.size else b"" for a in self._arrays)]

    def decode(self, frames: Sequence[Frame]) -> Message:
        self._frames = frames[1:]
        return self._decoder.decode(memoryview(frames[0])[_HEADER.size :])


_codec = _Codec()

# magic, version, kind, step, layer, T, D, K, hits, misses, promoted, evictions, bytes_read, disk_s, wait_s, compute_s
_STEP = struct.Struct("<4sHHQIIIIQQQQQddd")
_STEP_DTYPES = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.float32))
_STEPS = (Route, Routed, Hint)
_ROUTE, _ROUTED, _HINT = 1, 2, 3
_NO_COUNTERS = (0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
_STEP_HEAD = struct.Struct("<4sHHQIIII")  # the first fields of _STEP
_ROUTE_START = (STEP_MAGIC, VERSION, _ROUTE)


def _step_frame(message: Route | Routed | Hint) -> bytes:
    """Header, then x, ids and weights, or y: C order, one after the other. A hint has ids alone, K of no token."""
    if isinstance(message, Hint):
        head = (_HINT, message.step, message.layer, 0, 0, message.experts.size)
        return _STEP.pack(STEP_MAGIC, VERSION, *head, *_NO_COUNTERS) + message.experts.astype(np.int32).tobytes()
    if isinstance(message, Route):
        arrays: tuple[np.ndarray[Any, Any], ...] = (message.x, message.ids, message.weights)
        kind, top_k, counters = _ROUTE, message.ids.shape[1], _NO_COUNTERS
    else:
        arrays, kind, top_k, counters = (message.y,), _ROUTED, 0, msgspec.structs.astuple(message.counters)
    for array, dtype in zip(arrays, _STEP_DTYPES, strict=False):
        if array.dtype is not dtype:
            raise ProtocolError(
                f"cannot send an array of {array.dtype} in a step: x, weights and y are float32, ids int32"
            )
    num_tokens, hidden = arrays[0].shape
    header = _STEP.pack(STEP_MAGIC, VERSION, kind, message.step, message.layer, num_tokens, hidden, top_k, *counters)
    return b"".join((header, *(np.ascontiguousarray(array).data for array in arrays)))


def _step_message(frame: Frame) -> Route | Routed | Hint:
    if len(frame) < _STEP.size:
        raise ProtocolError(f"step of {len(frame)} bytes without its header of {_STEP.size}")
    _, version, kind, step, layer, num_tokens, hidden, top_k, *counters = _STEP.unpack_from(frame)
    _check_version(version)
    num_values = top_k if kind == _HINT else num_tokens * (hidden + 2 * top_k if kind == _ROUTE else hidden)
    if kind not in (_ROUTE, _ROUTED, _HINT) or len(frame) != _STEP.size + 4 * num_values:
        raise ProtocolError(
            f"step of kind {kind}, {num_tokens} tokens of {hidden} values, top-{top_k}, in {len(frame)} bytes"
        )
    if kind == _HINT:
        return Hint(step, layer, np.frombuffer(frame, np.int32, top_k, _STEP.size))
    values: Floats = np.ndarray((num_tokens, hidden), np.float32, frame, _STEP.size)
    if kind == _ROUTED:
        return Routed(step, layer, values, StepCounters(*counters))
    start = _STEP.size + values.nbytes
    ids: Ints = np.ndarray((num_tokens, top_k), np.int32, frame, start)
    weights: Floats = np.ndarray((num_tokens, top_k), np.float32, frame, start + ids.nbytes)
    return Route(step, layer, values, ids, weights)


class StepBuffers:
    """The frames of a `Route` and of its `Routed` for a fixed shape, and the arrays in them, which stay where they are.

    x float32 [T, D], ids int32 [T, K], weights float32 [T, K] are in the frame that `load` fills; y float32 [T, D] is in `answer`.
    """

    def __init__(self, num_tokens: int, hidden: int, top_k: int) -> None:
        self._shape = (num_tokens, hidden, top_k)
        self.route_bytes = _STEP.size + 4 * num_tokens * (hidden + 2 * top_k)
        self._route = _aligned_frame(self.route_bytes)
        self._routed = _aligned_frame(_STEP.size + 4 * num_tokens * hidden)
        values, end = self._route[_STEP.size :].view(np.int32), num_tokens * hidden
        chosen = num_tokens * top_k
        self.x: Floats = values[:end].view(np.float32).reshape(num_tokens, hidden)
        self.ids: Ints = values[end : end + chosen].reshape(num_tokens, top_k)
        self.weights: Floats = values[end + chosen :].view(np.float32).reshape(num_tokens, top_k)
        self.y: Floats = self._routed[_STEP.size :].view(np.float32).reshape(num_tokens, hidden)
        self._into, self._from = self._route.data, self._routed.data

    def load(self, frame: bytes) -> None:
        """Take in a route of this shape."""
        self._into[:] = frame

    def answer(self, step: int, layer: int, hits: int, compute_s: float) -> memoryview:
        """The `Routed` frame with what `y` holds, for a step that found everything in memory."""
        num_tokens, hidden, _ = self._shape
        head = (STEP_MAGIC, VERSION, _ROUTED, step, layer, num_tokens, hidden, 0)
        _STEP.pack_into(self._from, 0, *head, hits, 0, 0, 0, 0, 0.0, 0.0, compute_s)
        return self._from


def route_head(frame: bytes) -> tuple[int, int, int, int, int] | None:
    """Step, layer, T, D and K of a frame that begins as a `Route` does; None: it does not."""
    if len(frame) < _STEP.size:
        return None
    *start, step, layer, num_tokens, hidden, top_k = _STEP_HEAD.unpack_from(frame)
    return (step, layer, num_tokens, hidden, top_k) if tuple(start) == _ROUTE_START else None


def _aligned_frame(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A frame whose arrays begin at a multiple of 64 bytes."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -(raw.ctypes.data + _STEP.size) % 64
    return raw[start : start + nbytes]


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolError(
            f"peer speaks protocol {version}, this is {VERSION}: use one colibri-mp version on both sides"
        )


def to_frames(message: Message) -> list[Frame]:
    """The frames of a message. Array frames are views of the message's arrays: keep these unchanged until sent."""
    if isinstance(message, _STEPS):
        return [_step_frame(message)]
    return _codec.encode(message)


def from_frames(frames: Sequence[Frame]) -> Message:
    """The message of `frames`.

    Raises:
        ProtocolError: other magic or version, wrong number of frames, unknown message, field of a wrong type or size.
    """
    if not frames or len(frames[0]) < _HEADER.size:
        raise ProtocolError(f"message of {len(frames)} frames without a header of {_HEADER.size} bytes")
    magic, version, num_arrays = _HEADER.unpack_from(frames[0])
    if magic == STEP_MAGIC and len(frames) == 1:
        return _step_message(frames[0])
    if magic != MAGIC:
        raise ProtocolError(f"message starts with {magic!r} in place of {MAGIC!r}: not a colibri-mp peer")
    _check_version(version)
    if num_arrays != len(frames) - 1:
        raise ProtocolError(f"header announces {num_arrays} array frames, {len(frames) - 1} came")
    try:
        return _codec.decode(frames)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"message cannot be decoded: {error}") from error
