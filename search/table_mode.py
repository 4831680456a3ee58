"""Table mode: a CSV of runs in, the same with predictions out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from piper_core.errors import ConfigError, DirectiveError, PlanError
from search.candidate import Verdict
from search.request import Request
from search.steady import long_step
from search.validation.rows import NotExpressedError, Row, request_of

GIB = 1 << 30
NEEDED = ("model", "layers", "hidden", "heads", "ffn", "seq_len", "gpu", "n_gpus", "dp", "tp", "pp", "micro_batch",
          "global_batch")  # fmt: skip
"""Columns without which no row says what ran."""
ADDED = ("predicted_step_time_s", "predicted_tokens_per_s_per_gpu", "predicted_mfu_pct", "predicted_peak_memory_gb",
         "predicted_fits", "not_predicted_because")  # fmt: skip
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted of one row: seconds a step, tokens/s a GPU, MFU as a fraction, bytes of the fullest rank."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_memory_bytes: float
    fits: Verdict


def predict_row(row: Row) -> Predicted | str:
    """Return what is predicted of a row, or why nothing is.

    Raises:
        ConfigError: a number that is none, or negative.
    """
    try:
        request = request_of(row)
    except NotExpressedError as error:
        return str(error)
    return _predict(request)


@lru_cache(maxsize=4096)
def _predict(request: Request) -> Predicted | str:
    try:
        found = long_step(request)
    except (ConfigError, DirectiveError, PlanError) as error:
        return str(error)
    config, score = found.config, found.short
    batch = config.dp * config.micro_batch * config.num_microbatches
    gpus = config.pp * config.row_size
    rate = batch * request.seq_len / found.step_time_s / gpus
    flops = request.architecture.model_flops_per_token(request.seq_len)
    return Predicted(
        found.step_time_s, rate, rate * flops / request.cluster.device.matmul_flops, score.worst_row_bytes, score.fits
    )


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of a CSV file.

    Raises:
        ConfigError: a file that cannot be read, or lacks a column that is needed.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"table {path}: larger than {MAX_FILE_BYTES >> 20} MiB; predict it in parts")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"table {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"table {path}: not UTF-8 text; save it as a CSV file in UTF-8") from None
    return parse_table(text, str(path))


def parse_table(text: str, name: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of CSV text called ``name``.

    Raises:
        ConfigError: not CSV, or without a column that is needed.
    """
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = [dict(row) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"table {name}: not valid CSV, {error}") from None
    columns = list(reader.fieldnames or [])
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        raise ConfigError(f"table {name}: missing column {', '.join(missing)}; needed are {', '.join(NEEDED)}")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ConfigError(f"table {name}, line {number}: not as many values as there are columns")
    return columns, rows


def predict_rows(rows: Iterable[Row], name: str) -> list[Predicted | str]:
    """Return the prediction of each row of a table called ``name``.

    Raises:
        ConfigError: with the line of a number that is none, or negative.
    """
    found = []
    for number, row in enumerate(rows, 2):
        try:
            found.append(predict_row(row))
        except ConfigError as error:
            raise ConfigError(f"table {name}, line {number}: {error}") from None
    return found


def cells(found: Predicted | str) -> dict[str, str]:
    """Return the columns that table mode adds."""
    if isinstance(found, str):
        return dict.fromkeys(ADDED, "") | {"not_predicted_because": found}
    values = (
        f"{found.step_time_s:.6g}", f"{found.tokens_per_s_per_gpu:.6g}", f"{100 * found.mfu:.4g}",
        f"{found.peak_memory_bytes / GIB:.4g}", found.fits, "",
    )  # fmt: skip
    return dict(zip(ADDED, values, strict=True))


def write_table(columns: Sequence[str], rows: Sequence[Row], found: Sequence[Predicted | str]) -> str:
    """Return the CSV text of rows with their predictions."""
    out = io.StringIO(newline="")
    names = [*(column for column in columns if column not in ADDED), *ADDED]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, each in zip(rows, found, strict=True):
        writer.writerow({**row, **cells(each)})
    return out.getvalue()
