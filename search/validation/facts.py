"""The published measurements that the package carries.

Facts that other people measured and published; the columns ``source`` and ``table`` say where each row is from. Their
names are those of the files in ``facts``: steps of several sources, LLaMA layouts that ran or ran out of memory
(Hagemann 2023, arXiv 2311.05610), and small GPTs of vTrain (arXiv 2312.12391).
"""

from __future__ import annotations

import gzip
from pathlib import Path

from search.table_mode import parse_table

STEPS, FITS, SMALL = "measured_steps", "measured_fits", "measured_steps_vtrain"
FOLDER = Path(__file__).parent / "facts"


def load_facts(name: str) -> list[dict[str, str]]:
    """Return the rows of one table of the package."""
    text = gzip.decompress((FOLDER / f"{name}.csv.gz").read_bytes()).decode("utf-8")
    return parse_table(text, name)[1]
