"""A row's attention is the same to the bit whatever it is computed together with."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_cases import MAX_TOKENS, Q4, Block, batch_of, make_block, run_chunked
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mp.kernels import isa
from colibri_mp.kernels.attention import AttentionStage
from colibri_mp.kernels.kv_cache import KVCache
from colibri_mp.kernels.team import ThreadTeam

KINDS = [{}, {"head_dim": 24, "window": 8}, {"num_kv_heads": 4, "gated": True, "encodings": dict.fromkeys("qkvo", Q4)}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_chunks_and_threads_do_not_matter(kind: dict[str, object], num_threads: int) -> None:
    """Chunks of 1, 3, 7 and all tokens on 1, 2 and 3 threads give the bits of one token at a time on one."""
    block = make_block(**kind)  # type: ignore[arg-type]
    x = block.rows(MAX_TOKENS)
    with ThreadTeam(1) as team:
        alone = run_chunked(block.stage(team), block, x, 1)
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        for chunk in (1, 3, 7, MAX_TOKENS):
            assert np.array_equal(run_chunked(stage, block, x, chunk), alone)


def test_block_table_does_not_matter() -> None:
    """Shuffled blocks with remains of other sequences, not-a-numbers even, give the same bits."""
    block = make_block()
    x = block.rows(60)
    dirty = KVCache(2, 9, 2, 16)
    dirty.tiles[:] = np.nan
    with ThreadTeam(1) as team:
        stage = block.stage(team)
        clean = run_chunked(stage, block, x, 7)
        assert np.array_equal(run_chunked(stage, block, x, 7, np.array([8, 2, 5, 0]), dirty), clean)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_batches_do_not_matter(num_threads: int) -> None:
    """Sequences of different lengths in one batch, chunks and single rows mixed, give the bits they give alone."""
    block = make_block()
    prompts = [block.rows(n) for n in (20, 33, 5)]
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        alone = [run_chunked(stage, block, prompt, MAX_TOKENS) for prompt in prompts]
        together = run_together(stage, block, prompts)
    for got, want in zip(together, alone, strict=True):
        assert np.array_equal(got, want)


def run_together(stage: AttentionStage, block: Block, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Feed up to five rows of each prompt a step, the last prompt first."""
    kv, table = block.cache(9 * 16), np.random.default_rng(3).permutation(9).reshape(3, 3)
    outs = [prompt.copy() for prompt in prompts]
    fed = [0] * len(prompts)
    while any(done < len(prompt) for done, prompt in zip(fed, prompts, strict=True)):
        spans = [(s, fed[s], min(len(prompts[s]), fed[s] + 5 - s)) for s in (2, 0, 1)]
        rows = [(p, s) for s, start, end in spans for p in range(start, end)]
        x = np.concatenate([prompts[s][start:end] for s, start, end in spans])
        stage(x, block.weights, kv, 1, batch_of(rows, table))
        for (p, s), row in zip(rows, x, strict=True):
            outs[s][p] = row
        fed = [next(end for t, _, end in spans if t == s) for s in range(3)]
    return outs


LENGTHS = (19, 40, 7)


@pytest.fixture(scope="module")
def long_block() -> tuple[Block, list[np.ndarray], list[np.ndarray]]:
    """A block with a window, prompts, and what each gives alone, one token at a time."""
    block = make_block(11, window=13, head_dim=24, num_heads=6)
    prompts = [block.rows(n) for n in LENGTHS]
    with ThreadTeam(1) as team:
        stage = block.stage(team)
        return block, prompts, [run_chunked(stage, block, prompt, 1) for prompt in prompts]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_no_schedule_matters(
    long_block: tuple[Block, list[np.ndarray], list[np.ndarray]], data: st.DataObject, num_threads: int, seed: int
) -> None:
    """Whatever rows of which sequences meet in which step, in blocks wherever, each row has its bits."""
    block, prompts, alone = long_block
    kv, table = block.cache(16 * 16), np.random.default_rng(seed).permutation(16)[:9].reshape(3, 3)
    outs, fed = [prompt.copy() for prompt in prompts], [0, 0, 0]
    with ThreadTeam(num_threads) as team:
        stage = block.stage(team)
        while sum(fed) < sum(LENGTHS):
            order = data.draw(st.permutations(range(3)))
            counts = [min(8 - data.draw(st.integers(0, 8)), LENGTHS[s] - fed[s]) for s in order]
            rows = [(fed[s] + i, s) for s, count in zip(order, counts, strict=True) for i in range(count)]
            if not rows:
                continue
            x = np.stack([prompts[s][p] for p, s in rows])
            stage(x, block.weights, kv, 0, batch_of(rows, table))
            for (p, s), row in zip(rows, x, strict=True):
                outs[s][p] = row
                fed[s] += 1
    assert all(np.array_equal(got, want) for got, want in zip(outs, alone, strict=True))


@pytest.mark.parametrize("window", [None, 700])
def test_shared_splits_do_not_matter(window: int | None) -> None:
    """A long context whose splits several threads share gives the bits of one thread, row by row."""
    block = make_block(window=window)
    past = block.rng.standard_normal((2, 1090, 2, 16)).astype(np.float32)
    x, table = block.rows(6), np.arange(69)[None, :]
    results = []
    for num_threads, chunk in ((1, 6), (2, 6), (3, 2), (2, 1)):
        kv, out = block.cache(1104), x.copy()
        kv.write(1, table[0], 0, *past)
        with ThreadTeam(num_threads) as team:
            stage = block.stage(team)
            for start in range(0, 6, chunk):
                rows = [(1090 + p, 0) for p in range(start, start + chunk)]
                stage(out[start : start + chunk], block.weights, kv, 1, batch_of(rows, table))
                assert (stage._planned[2][-1] > 0) == (num_threads > 1)  # type: ignore[index]
        results.append(out)
    assert all(np.array_equal(result, results[0]) for result in results)


def other_instruction_sets() -> list[dict[str, str]]:
    """Environments that choose other instruction sets than this process has."""
    coarser = {
        "avx512_vnni": [{"NUMBA_CPU_NAME": "haswell"}, {"COLIBRI_ISA": "generic"}],
        "avx2": [{"COLIBRI_ISA": "generic"}],
        "neon_dot": [{"COLIBRI_ISA": "generic"}],
    }
    return coarser.get(isa.current().value, [])


def digest_block() -> np.ndarray:
    """Attention outputs that every process computes alike."""
    block = make_block(7, qk_norm="head", head_dim=24, encodings=dict.fromkeys("qkvo", Q4), num_heads=8)
    with ThreadTeam(2) as team:
        return run_chunked(block.stage(team), block, block.rows(50), 11)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("environment", other_instruction_sets(), ids=lambda env: "-".join(env.values()))
def test_instruction_sets_agree(environment: dict[str, str], tmp_path: Path) -> None:
    """AVX2 gives the bits of AVX-512; the generic set, which rounds twice where they fuse, the same to 2e-5."""
    path = tmp_path / "out.npy"
    code = f"import numpy, test_attention_exactness as t; numpy.save({str(path)!r}, t.digest_block())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | environment
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=280)
    got, want = np.load(path), digest_block()
    if environment.get("COLIBRI_ISA") == "generic":
        assert np.allclose(got, want, rtol=0, atol=2e-5)
    else:
        assert np.array_equal(got, want)


RUN_WITHOUT_COMPILING = """
from dataclasses import replace
from numba.core import event
from attention_cases import make_block, run_chunked
from colibri_mp.kernels.team import ThreadTeam

class Compiled(event.Listener):
    names = []
    def on_start(self, started):
        self.names.append(str(started.data["dispatcher"]))
    def on_end(self, ended):
        pass

event.register("numba:compile", Compiled())
with ThreadTeam(2) as team:
    for kv_bits in (32, 8):
        block = replace(make_block(), kv_bits=kv_bits)
        run_chunked(block.stage(team), block, block.rows(10), 10)
assert not Compiled.names, Compiled.names
"""


def compiled_files() -> dict[str, int]:
    """Files of the kernel cache and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in isa.prepare_cache().path.rglob("*.nb?")}


def test_second_process_compiles_nothing() -> None:
    """What one process compiled, the next one finds in the cache, for either width of the KV cache; it adds nothing to it."""
    block = make_block()
    with ThreadTeam(2) as team:
        run_chunked(block.stage(team), block, block.rows(10), 10)
    before = compiled_files()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", RUN_WITHOUT_COMPILING], env=environment, check=True, timeout=100)
    assert before
    assert compiled_files() == before
