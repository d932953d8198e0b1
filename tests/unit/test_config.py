"""Settings: sizes, ranges, and unknown names."""

import pytest

from colibri_mp.config import LaunchConfig, format_size, from_keywords, parse_size
from colibri_mp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("800m", 800_000_000),
        ("4096", 4096),
        (" 3 kB ", 3000),
        ("1TiB", 1 << 40),
        (77, 77),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    """Decimal and binary units, with or without B, in any case."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2 XB", "1e9", "0", 0, -5])
def test_what_is_no_size(text: str | int) -> None:
    """Anything else is an error."""
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (3_540_000, "3.54 MB"), (2e12, "2 TB"), (999_700, "1 MB")]
)
def test_sizes_for_people(nbytes: float, text: str) -> None:
    """Three digits and a unit."""
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_workers": -1}, "--workers must be at least 0"),
        ({"io": "mmap"}, "--io must be one of auto, buffered, direct"),
        ({"io_threads": 65}, "--io-threads must be at most 64"),
        ({"prefill_chunk": -1}, "--prefill-chunk"),
        ({"planes": 4}, "--planes"),
        ({"ram": "lots"}, "not a size"),
        ({"num_wokers": 1}, "did you mean 'num_workers'"),
        ({"zzz": 1}, "known are model, ram"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], what: str) -> None:
    """A bad value names the flag and its range, an unknown name the nearest known one."""
    with pytest.raises(ConfigError, match=what):
        from_keywords(LaunchConfig, settings)
