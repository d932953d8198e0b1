"""A session saved by one cluster and restored by another, over real processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri_mp import Cluster
from colibri_mp.errors import RequestError, SessionError, WriteError

TINY = Path(__file__).parents[1] / "golden" / "tiny"
PROMPT = [3 + 7 * i % 200 for i in range(100)]
GREEDY: dict[str, Any] = {"max_tokens": 13, "temperature": 0.0, "ignore_eos": True}


def launch(model: str = "olmoe", **settings: Any) -> Cluster:
    """A small cluster."""
    return Cluster.launch(TINY / model, **{"num_workers": 1, "num_threads": 1, "ctx": 192, **settings})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The one that restores."""
    with launch() as running:
        yield running


@pytest.fixture(scope="module")
def sparse() -> Iterator[Cluster]:
    """A model whose attention chooses what it reads."""
    with launch("glm_moe_dsa_shared") as running:
        yield running


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A file with the first turn of a conversation, the whole conversation, and the second answer."""
    path = tmp_path_factory.mktemp("sessions") / "session"
    with launch() as first:
        tokens = PROMPT + first.generate(PROMPT, **GREEDY).token_ids
        answer = first.save_session(tokens, path)
        assert (answer.num_tokens, answer.num_asked) == (112, 113)
        assert answer.num_bytes == path.stat().st_size
        tokens += [9, 9, 9]
        return path, tokens, first.generate(tokens, **GREEDY).token_ids


def test_a_restored_session_goes_on_as_if_nothing_had_happened(
    cluster: Cluster, saved: tuple[Path, list[int], list[int]]
) -> None:
    """Another cluster computes only what the file does not hold, and answers bit for bit the same."""
    path, tokens, second_answer = saved
    restored = cluster.restore_session(path)
    assert restored.num_tokens == restored.num_in_file == 112
    done = cluster.generate(tokens, **GREEDY)
    assert done.stats["cached_tokens"] == 112
    assert done.token_ids == second_answer
    assert cluster.restore_session(path).num_tokens == 112
    requests = cluster.stats()["requests"]
    assert requests["kv_blocks_free"] == requests["kv_blocks"]


def test_what_is_not_cached_is_not_saved(cluster: Cluster, tmp_path: Path) -> None:
    """Content that was never computed makes an empty file, which can be restored all the same."""
    assert cluster.save_session([250] * 50, tmp_path / "empty").num_tokens == 0
    assert cluster.restore_session(tmp_path / "empty").num_tokens == 0


def test_restores_what_there_is_memory_for(cluster: Cluster, saved: tuple[Path, list[int], list[int]]) -> None:
    """While a request holds most of the KV memory, the beginning of a session is restored, and nothing of the request is lost."""
    wanted = cluster.generate([5, 5], **{**GREEDY, "max_tokens": 120}).token_ids
    events = cluster.events([5, 5], **{**GREEDY, "max_tokens": 120})
    tokens = list(next(events).token_ids)  # type: ignore[union-attr]
    assert cluster.restore_session(saved[0]).num_tokens == 64
    tokens += [token for event in events for token in getattr(event, "token_ids", [])]
    assert tokens == wanted


def test_a_damaged_file_changes_nothing(
    cluster: Cluster, saved: tuple[Path, list[int], list[int]], tmp_path: Path
) -> None:
    """A flipped byte in the last block: an error, and nothing of the file is cached."""
    content = bytearray(saved[0].read_bytes())
    content[-100] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    cluster.generate([7, 7], **{**GREEDY, "max_tokens": 180})  # whatever was cached has to go
    before = cluster.stats()
    with pytest.raises(SessionError, match="checksum"):
        cluster.restore_session(tmp_path / "damaged")
    assert cluster.generate(saved[1], **GREEDY).stats["cached_tokens"] == 0
    assert before["requests"]["kv_blocks_free"] == before["requests"]["kv_blocks"]


def test_index_keys_are_part_of_a_session(sparse: Cluster, tmp_path: Path) -> None:
    """Sparse attention chooses the same positions over restored blocks, which others had taken meanwhile, as before."""
    tokens = [*PROMPT, *sparse.generate(PROMPT, **GREEDY).token_ids, 9, 9, 9]
    wanted = sparse.logits(tokens)
    assert sparse.save_session(tokens, tmp_path / "sparse").num_tokens == 112
    sparse.generate([7, 7], **{**GREEDY, "max_tokens": 180})
    assert sparse.restore_session(tmp_path / "sparse").num_tokens == 112
    done = sparse.generate(tokens, **GREEDY)
    assert done.stats["cached_tokens"] == 112
    assert done.token_ids[0] == int(wanted[-1].argmax())
    assert sparse.logits([*tokens, *done.token_ids])[len(tokens) - 1 : -1].argmax(axis=1).tolist() == done.token_ids


def test_a_file_of_another_model_is_refused(sparse: Cluster, saved: tuple[Path, list[int], list[int]]) -> None:
    """The error names what differs."""
    with pytest.raises(SessionError, match="another fingerprint"):
        sparse.restore_session(saved[0])


def test_bad_requests(cluster: Cluster, tmp_path: Path) -> None:
    """A prompt that is none, a place that cannot be written: errors of the request, and the cluster goes on."""
    with pytest.raises(RequestError, match="vocabulary"):
        cluster.save_session([10**6], tmp_path / "a")
    with pytest.raises(WriteError, match="nowhere"):
        cluster.save_session(PROMPT, tmp_path / "nowhere" / "a")
    with pytest.raises(SessionError, match="No such file"):
        cluster.restore_session(tmp_path / "a")
    assert cluster.generate([1], max_tokens=1).finish_reason in ("length", "stop")
