"""Resizing against a reference in float64: each output pixel is a weighted mean with a triangle as wide as the reduction."""

import numpy as np
import pytest

from sharder.data.resize import resize_with_padding


def triangle_weights(size_in: int, size_out: int) -> np.ndarray:
    """(size_out, size_in), rows add up to 1."""
    factor = size_in / size_out
    width = max(factor, 1.0)
    centres = (np.arange(size_out) + 0.5) * factor
    weights = np.maximum(0.0, 1 - np.abs(np.arange(size_in) + 0.5 - centres[:, None]) / width)
    return weights / weights.sum(1, keepdims=True)


def reference(image: np.ndarray, height: int, width: int) -> np.ndarray:
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    inner = int(image.shape[0] / ratio), int(image.shape[1] / ratio)
    rows, columns = triangle_weights(image.shape[0], inner[0]), triangle_weights(image.shape[1], inner[1])
    found = np.zeros((height, width, 3))
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    found[top : top + inner[0], left : left + inner[1]] = np.einsum("ah,hwc,bw->abc", rows, image, columns)
    return found


@pytest.mark.parametrize("size", [(96, 96), (48, 80), (120, 67), (30, 20), (224, 224), (64, 64)])
def test_a_picture_is_within_one_grey_level_of_the_reference(size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    found = resize_with_padding(image, 64, 64)
    assert found.dtype == np.uint8 and found.shape == (64, 64, 3)
    assert np.abs(found - reference(image, 64, 64)).max() <= 1.0


def test_a_wide_picture_has_black_above_and_below():
    found = resize_with_padding(np.full((20, 40, 3), 200, np.uint8), 32, 32)
    assert (found[:8] == 0).all() and (found[8:24] == 200).all() and (found[24:] == 0).all()


def test_a_picture_of_the_right_size_is_left_alone():
    image = np.random.default_rng(1).integers(0, 256, (16, 24, 3), np.uint8)
    assert np.array_equal(resize_with_padding(image, 16, 24), image)
