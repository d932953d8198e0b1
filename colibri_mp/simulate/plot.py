"""The simulation as a picture: hit rate and predicted speed over memory, a line for each policy."""

from collections.abc import Sequence
from pathlib import Path

from colibri_mp.errors import ConfigError
from colibri_mp.simulate.grid import Cell, Simulation
from colibri_mp.trace import TraceHeader


def plot_simulation(header: TraceHeader, simulation: Simulation, path: Path) -> None:
    """Write `path`, a PNG.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'colibri-mp[plot]'") from error
    cells = simulation.cells
    by_memory = all(cell.ram_bytes is not None for cell in cells)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, speeds = figure.subplots(1, 2)
    for policy in dict.fromkeys(cell.policy for cell in cells):
        mine = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: _memory(cell, by_memory))
        style = "--" if policy == "belady" else "-"
        rates.plot(*_line(mine, [100 * cell.hit_rate for cell in mine], by_memory), style, marker="o", label=policy)
        speeds.plot(*_line(mine, [cell.tokens_per_s for cell in mine], by_memory), style, marker="o", label=policy)
    for axes, name in ((rates, "experts found in memory, %"), (speeds, "decode, predicted tokens/s")):
        axes.set_xlabel("memory for everything (--ram), GB" if by_memory else "experts in memory, %")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rates.legend()
    figure.suptitle(f"{Path(header.model).name}: {simulation.as_run.decode_tokens} tokens traced")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from error


def _memory(cell: Cell, by_memory: bool) -> float:
    return cell.ram_bytes / 1e9 if by_memory and cell.ram_bytes is not None else 100 * cell.resident_share


def _line(cells: Sequence[Cell], values: Sequence[float | None], by_memory: bool) -> tuple[list[float], list[float]]:
    """Points of one policy; those without a value are left out."""
    points = [(_memory(cell, by_memory), value) for cell, value in zip(cells, values, strict=True) if value is not None]
    return [x for x, _ in points], [y for _, y in points]
