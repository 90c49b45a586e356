"""Pictures of cameras, by file and row: open files and decoded frames are kept, within bounds.

Nothing here imports jax: worker processes load this module.
"""

import io
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from sharder.config import UserError
from sharder.data.resize import resize_with_padding

MAX_OPEN_FILES = 16
"""Files of a reader that stay open at a time; a decoder holds a few MB."""


@dataclass(frozen=True)
class Wanted:
    """Frames of one file: rows of an image column, numbers of a video's frames, or encoded pictures by their first byte."""

    path: str
    column: str | None
    """Of encoded images."""
    rows: np.ndarray
    sizes: np.ndarray | None = None
    """Bytes of each encoded picture that begins at `rows`; None: rows or numbers are meant."""

    def at(self, places: np.ndarray) -> "Wanted":
        """Some of them."""
        return Wanted(self.path, self.column, self.rows[places], None if self.sizes is None else self.sizes[places])


def decode_image(data: bytes, where: str) -> np.ndarray:
    """A PNG or JPEG as uint8 (height, width, 3), RGB. Raises UserError."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:
        raise UserError(f"{where} is no image: {error}.") from None


class ImageColumn:
    """Encoded images of a parquet file, fetched a row group at a time."""

    def __init__(self, path: str, column: str):
        import pyarrow.parquet as pq

        self.path, self.column = path, column
        try:
            self._file = pq.ParquetFile(path)
        except Exception as error:
            raise UserError(f"{path} cannot be read as parquet: {error}") from None
        if column not in self._file.schema_arrow.names:
            raise UserError(f"{path} has no column {column!r}, only {', '.join(self._file.schema_arrow.names)}.")
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._ends = np.cumsum(sizes)
        self._groups: OrderedDict[int, object] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, rows: np.ndarray):
        for row in np.asarray(rows).tolist():
            if not 0 <= row < len(self):
                raise UserError(f"{self.path} has {len(self)} rows, but row {row} is asked for.")
            group = int(np.searchsorted(self._ends, row, side="right"))
            data = self._column(group)[row - (int(self._ends[group - 1]) if group else 0)].as_py()
            data = data.get("bytes") if isinstance(data, dict) else data
            if not isinstance(data, bytes):
                raise UserError(f"{self.path}, column {self.column}, row {row}, holds no bytes of an image.")
            yield decode_image(data, f"{self.path}, column {self.column}, row {row},")

    def _column(self, group: int):
        if group not in self._groups:
            while len(self._groups) >= 2:  # a row group holds an episode, or a whole file of up to 100 MB
                self._groups.popitem(last=False)
            self._groups[group] = self._file.read_row_group(group, columns=[self.column]).column(0)
        self._groups.move_to_end(group)
        return self._groups[group]

    def close(self) -> None:
        self._file.close()


class PictureBytes:
    """Encoded pictures that lie one after the other, between other things, in a file."""

    def __init__(self, path: str):
        try:
            self.path, self._file = path, open(path, "rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None

    def read(self, begins: np.ndarray, sizes: np.ndarray):
        for begin, size in zip(begins.tolist(), sizes.tolist()):
            self._file.seek(begin)
            yield decode_image(self._file.read(size), f"{self.path}, byte {begin},")

    def close(self) -> None:
        self._file.close()


class FrameReader:
    """Decoded frames, of their own size or resized with padding; for one thread.

    Among the frames of one call each is decoded once, and those of a file in ascending order.
    """

    def __init__(self, height_width: tuple[int, int] | None = None, cache_bytes: int = 0):
        self.height_width, self.cache_bytes = height_width, cache_bytes
        self.cached_bytes = 0
        self._cache: OrderedDict[tuple, np.ndarray] = OrderedDict()
        self._open: OrderedDict[tuple, object] = OrderedDict()

    def read(self, wanted: Wanted) -> np.ndarray:
        """uint8 (rows, height, width, 3). Raises UserError naming file and frame."""
        unique, first, inverse = np.unique(wanted.rows, return_index=True, return_inverse=True)
        key = (wanted.path, wanted.column, wanted.sizes is not None)
        found = {row: self._cache[(*key, row)] for row in unique.tolist() if (*key, row) in self._cache}
        for row in found:
            self._cache.move_to_end((*key, row))
        missing = np.array([row not in found for row in unique.tolist()], bool)
        if missing.any():
            rows = unique[missing]
            sizes = () if wanted.sizes is None else (wanted.sizes[first[missing]],)
            for row, frame in zip(rows.tolist(), self._file(key).read(rows, *sizes)):
                if self.height_width is not None:
                    frame = resize_with_padding(frame, *self.height_width)
                found[row] = frame
                self._keep((*key, row), frame)
        return np.stack([found[row] for row in unique.tolist()])[inverse.reshape(-1)]

    def _keep(self, key: tuple, frame: np.ndarray) -> None:
        if frame.nbytes > self.cache_bytes:
            return
        self._cache[key] = frame
        self.cached_bytes += frame.nbytes
        while self.cached_bytes > self.cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1].nbytes

    def _file(self, key: tuple):
        if key not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[key] = self._open_file(*key)
        self._open.move_to_end(key)
        return self._open[key]

    def _open_file(self, path: str, column: str | None, is_bytes: bool):
        if is_bytes:
            return PictureBytes(path)
        if column is not None:
            return ImageColumn(path, column)
        from sharder.data.lerobot.video import VideoFile

        return VideoFile(path)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._cache.clear()
        self.cached_bytes = 0
