"""A command to come."""

from __future__ import annotations

from argparse import Namespace

from profiler.console import Parser


def add_options(parser: Parser) -> None:
    """Add the options of the command."""


def run(options: Namespace) -> int:
    """Run it."""
    raise NotImplementedError
