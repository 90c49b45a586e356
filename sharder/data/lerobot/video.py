"""Frames of a video file by their number, in any order. Timestamps are never compared as floats.

The container's index says which frame is a key frame, so that a frame is reached by one seek and as few decoded
frames as there are since the key frame before it; frames in ascending order are decoded without seeking.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sharder.config import UserError


class VideoFile:
    """An open video. Not to be shared between threads."""

    def __init__(self, path: str | Path):
        """Raises UserError where the file is no video, or ends before its index says."""
        import av

        self.path = Path(path)
        try:
            self._container = av.open(str(path))
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, OSError, IndexError) as error:
            raise UserError(f"{path} cannot be read as video: {error}. The file is damaged or truncated.") from None
        self._stream.thread_type = "NONE"  # a worker has one core; several threads would only add delay
        self._pts, self._is_key = self._index()
        keys = np.flatnonzero(self._is_key)
        if not len(self._pts) or not len(keys) or keys[0] != 0:
            raise UserError(f"{path} cannot be read as video: it has {len(self._pts)} frames, and its first is no key frame.")
        self._key_before = keys[np.searchsorted(keys, np.arange(len(self._pts)), side="right") - 1]
        self._decoded: Iterator | None = None
        self._next = 0

    def __len__(self) -> int:
        """Number of frames."""
        return len(self._pts)

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every frame in the order shown: its time (in units of the stream) and whether it is a key frame."""
        entries = self._stream.index_entries
        found = [(e.timestamp, e.pos, e.size, e.is_keyframe) for e in entries]
        stops_at = self.path.stat().st_size
        if found and max(pos + size for _, pos, size, _ in found) > stops_at:
            inside = sum(pos + size <= stops_at for _, pos, size, _ in found)
            raise UserError(f"{self.path} is truncated: its index lists {len(found)} frames, the file ends after {inside}.")
        if not found or self._stream.codec_context.has_b_frames or found[0][0] != (self._stream.start_time or 0):
            found = self._demux()  # the index holds decoding times, which are not those shown
        found.sort()
        return np.array([f[0] for f in found], np.int64), np.array([f[3] for f in found], bool)

    def _demux(self) -> list[tuple[int, int, int, bool]]:
        import av

        try:
            packets = [
                (p.pts, 0, p.size, p.is_keyframe)
                for p in self._container.demux(self._stream)
                if p.pts is not None and not p.is_discard
            ]
            self._container.seek(0, stream=self._stream)
        except av.FFmpegError as error:
            raise UserError(f"{self.path} cannot be read as video: {error}. The file is damaged or truncated.") from None
        return packets

    def read(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """The frames with these numbers, ascending and each once: uint8 (height, width, 3), RGB as swscale converts it.

        Raises UserError where a frame is not there or cannot be decoded.
        """
        import av

        for number in np.asarray(numbers).tolist():
            if not 0 <= number < len(self._pts):
                raise UserError(
                    f"{self.path} has {len(self._pts)} frames, but frame {number} is asked for: the video is truncated, or the table of episodes wrong."
                )
            try:
                yield self._frame(number).to_ndarray(format="rgb24")
            except (av.FFmpegError, StopIteration) as error:
                self._decoded = None
                raise UserError(
                    f"{self.path}, frame {number}, cannot be decoded: {error or 'the stream ends there'}."
                ) from None

    def _frame(self, number: int):
        if self._decoded is None or not self._key_before[number] <= self._next <= number:
            self._container.seek(int(self._pts[number]), stream=self._stream)
            self._decoded = self._container.decode(self._stream)
        while True:
            frame = next(self._decoded)
            found = int(np.searchsorted(self._pts, frame.pts))
            self._next = found + 1
            if found >= number:
                break
        if self._pts[found] != frame.pts or found != number:
            raise StopIteration(f"found time {frame.pts} where {self._pts[number]} should be")
        return frame

    def close(self) -> None:
        self._decoded = None
        self._container.close()
