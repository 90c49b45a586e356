"""Resizing of camera pictures, as the robot policies were trained with."""

import numpy as np


def resize_with_padding(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 (h, w, 3) to (height, width, 3): scaled to fit without distortion, black around it.

    Bilinear with a support that grows with the reduction (Pillow's filter), sizes and offsets rounded down. A picture that has
    the size already is returned as it is.
    """
    from PIL import Image

    if image.shape[:2] == (height, width):
        return image
    inner_height, inner_width = fitted_size(image.shape[0], image.shape[1], height, width)
    resized = np.asarray(
        Image.fromarray(np.ascontiguousarray(image)).resize((inner_width, inner_height), Image.Resampling.BILINEAR)
    )
    padded = np.zeros((height, width, image.shape[2]), image.dtype)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    padded[top : top + inner_height, left : left + inner_width] = resized
    return padded


def fitted_size(image_height: int, image_width: int, height: int, width: int) -> tuple[int, int]:
    """The largest size of the picture's shape that fits into height x width, at least 1 each."""
    ratio = max(image_width / width, image_height / height)
    return max(1, int(image_height / ratio)), max(1, int(image_width / ratio))
