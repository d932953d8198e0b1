"""The training loop: fixed seeds, batches and schedule by step number, checkpoints that resume exactly."""

import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import Tensor
from torch.optim import Optimizer

from .data import KINDS, Batches, Stream
from .model import Model, Shape
from .optim import optimizers, schedule

BALANCE_WEIGHT = 0.01


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the data and the version of PyTorch."""

    steps: int
    decay_steps: int
    batch_tokens: int = 4096
    length: int = 256
    decay_length: int = 512
    lr: float = 0.01
    adam_lr: float = 0.003
    seed: int = 0
    threads: int = 2

    def length_at(self, step: int) -> int:
        """Windows are longer in the decay, so that the model has seen far positions."""
        return self.length if step < self.steps - self.decay_steps else self.decay_length


class Run:
    """A model, its optimizers and the number of steps taken.

    Each thread trains a replica of the model (same weights, own gradients) on its part of the batch with single-threaded
    operations, and then updates its share of the weights. The threads meet twice a step instead of twice an operation, so
    a busy machine costs what it takes and no more, and the result does not depend on how a product was split.
    """

    def __init__(self, recipe: Recipe, shape: Shape, data: Path, out: Path) -> None:
        torch.manual_seed(recipe.seed)
        torch.set_num_threads(1)
        self.recipe, self.out, self.step = recipe, out, 0
        self.cycles: list[tuple[int, int]] = []  # steps and decay steps of runs that were finished before this one
        self.model = Model(shape)
        self.replicas = [self.model, *(replica_of(self.model) for _ in range(recipe.threads - 1))]
        self.batches = Batches(data, recipe.seed)
        self.held_out = HeldOut(data)
        self.optimizers = optimizers(self.model, recipe.lr, recipe.adam_lr, recipe.threads)
        self.pool = ThreadPoolExecutor(recipe.threads, initializer=torch.set_num_threads, initargs=(1,))

    def resume(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, saved = state["step"], state["recipe"]
        self.cycles = [*state["cycles"]]
        if self.step == saved["steps"] < self.recipe.steps:  # to its end, and now on: the rate rises again at once
            self.cycles.append((saved["steps"], saved["decay_steps"]))

    def save(self) -> None:
        """Write the checkpoint beside the old one, then take its place."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": states, "step": self.step}
        state |= {"shape": asdict(self.model.shape), "recipe": asdict(self.recipe), "cycles": self.cycles}
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def train_step(self) -> tuple[float, float]:
        """One update; returns (cross entropy in nats per token, mean load-balance loss)."""
        length = self.recipe.length_at(self.step)
        batch = torch.from_numpy(self.batches.batch(self.step, self.recipe.batch_tokens // length, length))
        found = list(self.pool.map(self.add_gradients, self.replicas, batch.chunk(self.recipe.threads)))
        list(self.pool.map(self.update, self.optimizers))
        self.step += 1
        loss, balance = np.mean(found, axis=0)
        return float(loss), float(balance)

    def add_gradients(self, model: Model, batch: Tensor) -> tuple[float, float]:
        """Forward and backward over one thread's part of the batch."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        balance = torch.stack([routing.balance for routing in model.routings()])
        ((loss + BALANCE_WEIGHT * balance.sum()) / self.recipe.threads).backward()  # type: ignore[no-untyped-call]
        return loss.item(), balance.mean().item()

    def update(self, optimizer: Optimizer) -> None:
        """Sum the replicas' gradients of this optimizer's weights, and take its step."""
        (group,) = optimizer.param_groups
        for weight in group["params"]:
            for copy in self.copies[weight]:
                weight.grad.add_(copy.grad)
                copy.grad = None
        if isinstance(optimizer, torch.optim.AdamW):
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = group["peak_lr"] * schedule(self.step, self.recipe.steps, self.recipe.decay_steps)
        optimizer.step()
        optimizer.zero_grad()

    @cached_property
    def copies(self) -> dict[Tensor, list[Tensor]]:
        """The other replicas' parameters of each weight."""
        columns = zip(*(replica.parameters() for replica in self.replicas), strict=True)
        return {weight: list(others) for weight, *others in columns}


def replica_of(model: Model) -> Model:
    """A model whose weights are the same memory, but which gathers gradients of its own."""
    replica = Model(model.shape)
    for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
        own.data = shared.data
    return replica


class HeldOut:
    """Held-out windows in order, of each kind."""

    def __init__(self, data: Path) -> None:
        self.streams = {kind: Stream.load(data / f"{kind}.held.npz") for kind in KINDS}

    @torch.no_grad()
    def bits_per_byte(
        self, model: Model, length: int, most: int | None = None, after_batch: Callable[[str], None] | None = None
    ) -> dict[str, float]:
        """Per kind, over the first ``most`` windows (None: all), in bfloat16.

        The special tokens cost bits but count no bytes. ``after_batch`` is called with the kind after each batch, while the
        model still holds that batch's routing.
        """
        model.eval()
        found = {}
        for kind, stream in self.streams.items():
            nats, count = 0.0, 0
            for windows in windows_of(stream.ids, length, most):
                nats += window_nats(model, windows)
                count += windows[:, 1:].numel()
                if after_batch:
                    after_batch(kind)
            found[kind] = nats / count / math.log(2) * len(stream.ids) / stream.text_bytes
        model.train()
        return found


def windows_of(ids: np.ndarray, length: int, most: int | None, batch_tokens: int = 4096) -> list[Tensor]:
    """[some, length + 1] each, one token shared between neighbours; a last short window comes alone."""
    starts = range(0, len(ids) - 1, length)[:most]
    windows = [torch.from_numpy(ids[at : at + length + 1].astype(np.int64)) for at in starts]
    full = [window for window in windows if len(window) == length + 1]
    batch = batch_tokens // length
    batches = [torch.stack(full[at : at + batch]) for at in range(0, len(full), batch)]
    return batches + [window[None] for window in windows[len(full) :]]


def window_nats(model: Model, windows: Tensor) -> float:
    """Summed cross entropy of every token but the first of each window."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").item()


class Log:
    """Lines to the screen and a file; a running mean of the loss and the speed since the last line."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)
        self.mean = self.balance = float("nan")
        self.started = self.last = time.monotonic()
        self.tokens = 0

    def write(self, line: str) -> None:
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        print(stamped, flush=True)
        self.file.write(stamped + "\n")

    def add(self, step: int, loss: float, balance: float, tokens: int, every_s: float) -> None:
        self.mean = loss if math.isnan(self.mean) else 0.97 * self.mean + 0.03 * loss
        self.balance, self.tokens = balance, self.tokens + tokens
        now = time.monotonic()
        if now - self.last > every_s:
            speed = self.tokens / (now - self.last)
            timing = f"{(now - self.started) / 60:.1f} min {speed:.0f} tokens/s"
            self.write(f"step {step} {timing} loss {self.mean:.3f} balance {self.balance:.3f}")
            self.last, self.tokens = now, 0


def train(run: Run, *, save_every_s: float = 240, log_every_s: float = 60) -> None:
    """Take the steps that are left. SIGTERM ends the run early, with a checkpoint to resume from."""
    recipe, stops = run.recipe, []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    run.out.mkdir(parents=True, exist_ok=True)
    log = Log(run.out / "train.log")
    log.write(f"{sum(w.numel() for w in run.model.parameters())} parameters, {recipe}, from step {run.step}")
    saved = time.monotonic()
    while run.step < recipe.steps and not stops:
        loss, balance = run.train_step()
        log.add(run.step, loss, balance, recipe.batch_tokens, log_every_s)
        if time.monotonic() - saved > save_every_s:
            run.save()
            saved = time.monotonic()
        if run.step % 500 == 0:
            bits = run.held_out.bits_per_byte(run.model, recipe.length, most=16)
            log.write(
                f"step {run.step} held-out bits/byte { ({kind: round(value, 3) for kind, value in bits.items()}) }"
            )
    run.save()
    log.write(f"{'stopped' if stops else 'done'} at step {run.step}")
