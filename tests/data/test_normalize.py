import json

import numpy as np
import pytest

from sharder.config import UserError
from sharder.data.normalize import NormStats, normalize, read_norm_stats, unnormalize, write_norm_stats

RNG = np.random.default_rng(0)
STATS = NormStats(RNG.standard_normal(5), RNG.uniform(0.1, 2, 5), -RNG.uniform(1, 2, 5), RNG.uniform(1, 2, 5))
X = RNG.standard_normal((3, 4, 5)).astype(np.float32)


def test_z_score_is_its_formula():
    assert np.allclose(normalize(X, STATS, "z_score"), (X - STATS.mean) / (STATS.std + 1e-6), atol=1e-6)


def test_quantiles_are_their_formula():
    assert np.allclose(normalize(X, STATS, "quantile"), (X - STATS.q01) / (STATS.q99 - STATS.q01 + 1e-6) * 2 - 1, atol=1e-6)


@pytest.mark.parametrize("how", ["z_score", "quantile", "none"])
def test_unnormalize_undoes_normalize(how):
    assert np.allclose(unnormalize(normalize(X, STATS, how), STATS, how), X, atol=1e-6)


@pytest.mark.parametrize("how", ["z_score", "quantile"])
def test_statistics_of_more_dimensions_are_cut_and_of_fewer_leave_the_rest(how):
    assert np.array_equal(normalize(X[..., :3], STATS, how), normalize(X, STATS, how)[..., :3])
    longer = np.concatenate([X, X], -1)
    for function in (normalize, unnormalize):
        assert np.array_equal(function(longer, STATS, how)[..., 5:], X)


def test_clip_bounds_what_is_normalised():
    found = normalize(100 * X, STATS, "quantile", clip=1.5)
    assert np.abs(found).max() == 1.5
    inside = np.abs(normalize(100 * X, STATS, "quantile")) < 1.5
    assert np.array_equal(found[inside], normalize(100 * X, STATS, "quantile")[inside])


def test_a_least_range_keeps_a_still_dimension_small():
    still = NormStats(np.zeros(1), np.zeros(1), np.array([0.1]), np.array([0.1005]))
    x = np.array([[0.0], [0.1], [0.2]], np.float32)
    assert np.abs(normalize(x, still, "quantile")).max() > 300
    found = normalize(x, still, "quantile", least_range=0.1)
    assert np.abs(found).max() < 2.1
    assert np.allclose(unnormalize(found, still, "quantile", least_range=0.1), x, atol=1e-6)


def test_the_file_is_that_of_openpi(tmp_path):
    write_norm_stats(tmp_path / "assets", {"state": STATS, "actions": NormStats(STATS.mean, STATS.std)})
    tree = json.loads((tmp_path / "assets" / "norm_stats.json").read_text())
    assert set(tree) == {"norm_stats"} and set(tree["norm_stats"]["state"]) == {"mean", "std", "q01", "q99"}
    assert tree["norm_stats"]["actions"]["q01"] is None
    found = read_norm_stats(tmp_path / "assets")
    assert np.array_equal(found["state"].q99, STATS.q99) and found["actions"].q99 is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read as JSON"),
        ("{}", "field norm_stats, is missing"),
        ('{"norm_stats": {"state": {"mean": [0], "std": "x"}}}', "norm_stats.state.std"),
        ('{"norm_stats": {"state": {"mean": [0, 1], "std": [1]}}}', "different lengths"),
        ('{"norm_stats": {"state": {"mean": [NaN], "std": [1]}}}', "norm_stats.state.mean"),
    ],
)
def test_a_wrong_file_is_one_message(tmp_path, text, message):
    (tmp_path / "norm_stats.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_norm_stats(tmp_path)


def test_quantiles_that_are_not_there_are_asked_for():
    with pytest.raises(UserError, match="q01 and q99"):
        normalize(X, NormStats(STATS.mean, STATS.std), "quantile")
