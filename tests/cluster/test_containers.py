"""Containers through real processes: the same bits of logits as the source; the command as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conversion import files_of, made

from colibri_mp import Cluster
from colibri_mp.checkpoint.convert import Options
from colibri_mp.checkpoint.hub import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = [
    "tiny/olmoe",
    "tiny/qwen3_moe_mixed",
    "tiny_mlx/qwen3_moe_mixed_4_6",
    "tiny_mlx/qwen3_moe_mxfp4",
]  # every other layout is held to the byte of its slabs in tests/unit/test_container.py
COMMAND = [sys.executable, "-m", "colibri_mp", "convert"]
OLMOE = GOLDEN / "tiny" / "olmoe"
PROMPT = list(range(3, 60))


def logits(model: Path, **changes: object) -> bytes:
    """The bits of a prompt's logits, with half the experts in memory."""
    settings = {"num_workers": 1, "num_threads": 1, "ctx": 128, "slots": 4, **changes}
    with Cluster.launch(str(model), **settings) as cluster:
        return cluster.logits(PROMPT).tobytes()


@pytest.mark.parametrize("name", FIXTURES)
def test_same_bits(tmp_path: Path, name: str) -> None:
    """A lossless container gives the logits of its source to the last bit, read buffered by one worker or direct by two."""
    made(GOLDEN / name, tmp_path / "out")
    expected = logits(GOLDEN / name)
    changed = {"num_workers": 2, "num_threads": 2, "io": "direct"}
    assert logits(tmp_path / "out", **(changed if name == FIXTURES[0] else {})) == expected


def test_same_bits_of_the_built_in_model(tmp_path: Path) -> None:
    """Text included, with its own tokenizer."""
    made(resolve("demo"), tmp_path / "out")
    found = []
    for model in ("demo", str(tmp_path / "out")):
        with Cluster.launch(model, num_workers=2, num_threads=1, ctx=256, slots=8) as cluster:
            text = cluster.generate("Once upon a time", max_tokens=40, temperature=0.0).text
            found.append((text, cluster.logits(PROMPT).tobytes()))
    assert found[0] == found[1]
    assert len(found[0][0]) > 40


def test_eight_bits_are_close(tmp_path: Path) -> None:
    """Quantised experts run: 8 bits stay near the reference, 4 bits are further off, and neither is the same."""
    golden = np.load(OLMOE / "golden.npz")
    prompt = [*golden["input_ids"].tolist(), *golden["generated_ids"].tolist()]
    errors = []
    for bits in ("8", "4"):
        made(OLMOE, tmp_path / bits, Options(bits, 32))  # type: ignore[arg-type]  # a literal
        with Cluster.launch(str(tmp_path / bits), num_workers=1, num_threads=1, ctx=128) as cluster:
            errors.append(float(np.abs(cluster.logits(prompt) - golden["logits"]).mean()))
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1] < 1


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `colibri-cluster convert`."""
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=100)


def test_command(tmp_path: Path) -> None:
    """Progress on stderr, what became of each projection on stdout, or one JSON object."""
    done = convert(OLMOE, tmp_path / "a", "--bits", "mixed", "--group-size", "32")
    assert done.returncode == 0, done.stderr
    assert "converting: " in done.stderr
    assert "s left" in done.stderr
    assert "gate  bf16 -> affine 4 bit in groups of 32, quantised: error " in done.stdout
    assert "down  bf16 -> affine 8 bit in groups of 32, quantised: error 0." in done.stdout
    done = convert(OLMOE, tmp_path / "b", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["num_experts"] == 32
    assert [found["error"] for found in report["projections"]] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        ([OLMOE, OLMOE], 2, "is not empty"),
        ([OLMOE, "new", "--group-size", "32"], 2, "--group-size needs --bits"),
        ([OLMOE, "new", "--bits", "5"], 2, "invalid choice: '5'"),
        ([OLMOE, "new", "--bits", "4"], 2, "give --group-size 32"),
        (["/no/such/model", "new"], 3, "/no/such/model"),
        ([OLMOE], 2, "required: DST"),
    ],
)
def test_wrong_usage(arguments: list[object], code: int, wanted: str) -> None:
    """One line that says what is wrong, and nothing is written."""
    done = convert(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("new").exists()


def test_ctrl_c_and_on(tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit code 130, a line that says how to go on; and the same command goes on."""
    source, folder = resolve("demo"), tmp_path / "out"
    process = subprocess.Popen([*COMMAND, source, folder], stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (folder / "resident.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted; what is finished is kept: go on with the same command" in err
    assert "Traceback" not in err
    done = convert(source, folder, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kept_files"] >= 1
    made(source, tmp_path / "undisturbed")
    assert files_of(folder) == files_of(tmp_path / "undisturbed")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs to mount a small disk: Linux, root")
def test_disk_that_fills_up(tmp_path: Path) -> None:
    """A disk that is full in the middle: the file is named with the cure; with more room the same command goes on."""
    source, disk = resolve("demo"), tmp_path / "disk"
    disk.mkdir()
    optimist = (
        "import shutil, sys; shutil.disk_usage = lambda _: type('', (), {'free': 1 << 40}); "
        "from colibri_mp.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = f'{sys.executable} -c "{optimist}" convert {source} {disk / "out"}'
    script = f"mount -t tmpfs -o size=6M tmpfs {disk} && {command}; test $? = 12 && mount -o remount,size=40M {disk} && {command}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "experts-00002.safetensors: cannot be written: No space left on device" in done.stderr
    assert "make room" in done.stderr
    assert "3 files were there already" in done.stdout
