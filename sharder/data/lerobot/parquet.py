"""Columns of parquet files as numpy arrays."""

from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.lerobot.info import Feature


def read_table(path: Path, columns: list[str] | None):
    """A pyarrow table. Raises UserError where the file is missing, damaged, or lacks a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(f"{path} is missing.")
    try:
        with pq.ParquetFile(path) as file:
            missing = [c for c in columns or () if c not in file.schema_arrow.names]
            if missing:
                raise UserError(f"{path} has no column {missing[0]!r}, only {', '.join(file.schema_arrow.names)}.")
            return file.read(columns)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from None


def to_numpy(path: Path, column, feature: Feature) -> np.ndarray:
    """A column (rows,) of scalars or lists as (rows, size), in the column's own dtype.

    Raises UserError where a row has another number of values than the feature's shape says, or a null.
    """
    import pyarrow as pa

    name, rows = feature.name, len(column)
    if column.null_count:
        raise UserError(f"{path}, column {name}, has {column.null_count} nulls.")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.empty((0, feature.size), np.float32)] if not chunks else []
    for chunk in chunks:
        nested = 0
        while pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type) or pa.types.is_fixed_size_list(chunk.type):
            counts = _row_lengths(chunk)
            if not nested and len(feature.shape) == 1 and (counts != feature.size).any():
                row = int(np.argmax(counts != feature.size))
                raise UserError(_mismatch(path, feature, f"row {row} holds {counts[row]} values"))
            chunk, nested = chunk.flatten(), nested + 1
        if not (pa.types.is_floating(chunk.type) or pa.types.is_integer(chunk.type) or pa.types.is_boolean(chunk.type)):
            raise UserError(f"{path}, column {name}, is of type {column.type}, but feature {name} is of dtype {feature.dtype}.")
        if chunk.null_count:
            raise UserError(f"{path}, column {name}, has {chunk.null_count} nulls.")
        parts.append(chunk.to_numpy(zero_copy_only=False))
    flat = np.concatenate([p.reshape(-1) for p in parts])
    if flat.size != rows * feature.size:
        raise UserError(_mismatch(path, feature, f"{rows} rows hold {flat.size} values"))
    return flat.reshape(rows, feature.size)


def _row_lengths(chunk) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size)
    return pc.list_value_length(chunk).to_numpy(zero_copy_only=False)


def _mismatch(path: Path, feature: Feature, found: str) -> str:
    return f"{path}, column {feature.name}: {found}, but meta/info.json, field features.{feature.name}.shape, is {list(feature.shape)}."
