"""Which layers have an indexer, in all the ways that a config may say it."""

import pytest

from colibri_mp.errors import CheckpointError
from colibri_mp.models.config import ConfigReader
from colibri_mp.models.indexer import read_indexer, read_indexer_layers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "FFFFFF"),
        ({"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}, "FFSSFS"),
        ({"indexer_types": ["full", "shared"] * 4, "index_topk_pattern": "FFFFFF"}, "FSFSFS"),
        ({"index_topk_pattern": "FSSFSS"}, "FSSFSS"),
        ({"index_topk_pattern": ["full", "shared", "full", "full", "full", "full"]}, "FSFFFF"),
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFSFS"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 0}, "FFFFFF"),
    ],
)
def test_layers_with_an_indexer(fields: dict[str, object], expected: str) -> None:
    """The list, the pattern, frequency and offset, or nothing."""
    assert read_indexer_layers(ConfigReader(fields), 6) == tuple(letter == "F" for letter in expected)


def test_published_shape_of_glm() -> None:
    """78 layers with an indexer in every fourth: 21 have one, 57 share."""
    assert sum(read_indexer_layers(ConfigReader({"index_topk_freq": 4}), 78)) == 21


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"] * 5}, "indexer_types names 5 layers, num_hidden_layers = 6"),
        ({"indexer_types": ["shared"] * 6}, "the first layer has no other"),
        ({"indexer_types": ["full"] * 5 + ["half"]}, "indexer_types = 'half' is not supported"),
        ({"index_topk_pattern": "FFXSFF"}, "index_topk_pattern = 'X' is not supported"),
        ({"index_topk_freq": 0}, "index_topk_freq = 0 must be a whole number"),
    ],
)
def test_impossible_lists_are_refused(fields: dict[str, object], message: str) -> None:
    """With the field and what is wrong with it."""
    with pytest.raises(CheckpointError, match=message):
        read_indexer_layers(ConfigReader(fields), 6)


def test_sizes() -> None:
    """Defaults are the reference's; the pairing can be stated."""
    spec = read_indexer(ConfigReader({}), 6144, 2048, 64)
    assert (spec.num_heads, spec.head_dim, spec.top_k, spec.interleaved) == (32, 128, 2048, True)
    assert not read_indexer(ConfigReader({"indexer_rope_interleave": False}), 6144, 2048, 64).interleaved
