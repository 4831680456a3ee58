"""The folder of a search: what is written there, and read back for a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_core.errors import ConfigError
from piper_core.program.write import replace_file
from search.database import differs

if TYPE_CHECKING:
    from piper_core.program.strategy import Strategy
    from search.predict import Prediction

BEST, RESULT, REPORT, TIMELINE = "best.strategy.yaml", "result.json", "report.html", "timeline.perfetto.json"
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Folder:
    """What a search left: its result as JSON data, its best strategy priced again, and the text of that strategy."""

    result: Mapping[str, Any]
    best: Prediction
    text: str


def read_folder(folder: Path) -> Folder:
    """Read what a search wrote.

    Raises:
        ConfigError: no result there, or one that cannot be read; ProgramError: its best strategy.
    """
    from piper_core.program.strategy import load
    from search.pricing import predict_as_said

    result = read_result(folder)
    if result is None:
        raise ConfigError(f"{folder} holds no {RESULT}; name the --out folder of a search")
    best = predict_as_said(load(folder / BEST))
    return Folder(result, best, (folder / BEST).read_text(encoding="utf-8"))


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result that a search wrote in a folder, None where there is none.

    Raises:
        ConfigError: a file of that name that is no result.
    """
    path = folder / RESULT
    try:
        if not path.exists():
            return None
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is over {MOST_BYTES >> 20} MiB, and so no result of a search; name another "
                              "folder")  # fmt: skip
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name another folder") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not the result of a search: it is no JSON; name another folder") from None
    if not isinstance(data, dict) or not isinstance(data.get("candidates"), list):
        raise ConfigError(f"{path} is not the result of a search: it has no candidates; name another folder")
    return data


def check_same_search(folder: Path, search: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another search.

    Raises:
        ConfigError: with what differs.
    """
    there = read_result(folder)
    if there is None or "search" not in there:
        return
    head = {name: value for name, value in there["search"].items() if name in search}
    if words := differs(head, search):
        raise ConfigError(f"--out {folder} holds another search ({words}); name another folder")


def write_folder(folder: Path, strategy: Strategy, result: Mapping[str, Any]) -> list[str]:
    """Write the best strategy, the result, the page and the timeline, each whole or not at all; return their names.

    The strategy and the result come first: a page that cannot be made leaves them.

    Raises:
        ConfigError: the folder cannot be made; ProgramError: a file cannot be written.
    """
    from piper_core.program.strategy import dump
    from search.export.perfetto import trace_of
    from search.pricing import predict_as_said
    from search.report.html import html_report

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made: {error.strerror}; name another folder") from None
    dump(strategy, folder / BEST)
    replace_file(folder / RESULT, json.dumps(result, indent=1) + "\n")
    best = predict_as_said(strategy)
    replace_file(folder / REPORT, html_report(result, best, (folder / BEST).read_text(encoding="utf-8")))
    replace_file(folder / TIMELINE, trace_of(best))
    return [BEST, RESULT, REPORT, TIMELINE]
