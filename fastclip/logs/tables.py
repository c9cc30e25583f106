# SPDX-License-Identifier: BSD-3-Clause
"""Tables of numbers: CSV, JSON lines, a JSON array, lines of `name:number`; as rows, and rows as records."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..monitor.record import Record
from ..monitor.sinks import LogError
from .columns import USABLE, choose, field_of, told
from .merge_steps import Steps, repeats_told
from .parse_numbers import number_of, shown, step_of
from .text_files import lines_of, text_of

# Columns that tell which data a row is about, and how what they say of other data than training's begins.
_SPLITS = ("split", "mode", "phase", "stage", "subset")
_OTHERS = ("val", "eval", "test", "dev")
_DEPTH = 3
# What the columns of llm.c's lines stand for.
_SHORT = {"s": "step", "trl": "train_loss"}
_PAIRS = re.compile(r"(?:[A-Za-z_]\w*:[^\s:]+\s+)*[A-Za-z_]\w*:[^\s:]+")
# The end of a file that was cut off while it was written.
_TORN = "the last line is incomplete and was left out"


@dataclass(slots=True)
class Row:
    """The cells of a line that may be fields of a record, by column, and where they stand."""

    place: str
    cells: dict[str, Any]


class Table:
    """All rows of a file.

    Attributes:
        columns: all columns that were met, in their order.
        rows: of cells whose column may be a field and that are not empty.
    """

    def __init__(self) -> None:
        self.columns: dict[str, bool] = {}  # whether it may be a field
        self.rows: list[Row] = []

    def add(self, place: str, cells: Iterable[tuple[str, Any]]) -> None:
        known = self.columns
        kept = {}
        for column, value in cells:
            useful = known.get(column)
            if useful is None:
                useful = known[column] = field_of(column) is not None
            if useful and value is not None and value != "":
                kept[column] = value
            elif isinstance(value, str) and column.lower() in _SPLITS and value.lower().startswith(_OTHERS):
                return
        if kept:
            self.rows.append(Row(place, kept))


def read_csv(path: Path, warnings: list[str]) -> Table:
    """With a header; separated by commas, semicolons or tabs; lines that begin with # are passed over."""
    table = Table()
    lines = ((n, line) for n, line in lines_of(path, warnings) if line.strip() and not line.startswith("#"))
    number, header = next(lines, (1, ""))
    separator = max(",;\t", key=header.count)
    columns = [_without_run(column) for column in _cells(path, number, header, separator)]
    if not any(field_of(column) in USABLE for column in columns):
        raise LogError(f"{path}:{number}: {told(columns)}")
    if twice := {c for c in columns if columns.count(c) > 1 and field_of(c) in USABLE}:
        raise LogError(f"{path}:{number}: expected one run, but got several columns {sorted(twice)[0]!r}")
    table.add("", ((column, None) for column in columns))  # known, even if no row follows
    for number, line in lines:
        cells = _cells(path, number, line, separator)
        if len(cells) != len(columns):
            if not line.endswith(("\n", "\r")) and len(cells) < len(columns):
                warnings.append(f"{path}:{number}: {_TORN}")
                break
            raise LogError(f"{path}:{number}: expected {len(columns)} cells, but got {len(cells)}")
        table.add(f"{path}:{number}", zip(columns, cells, strict=True))
    return table


def _cells(path: Path, number: int, line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error as error:
        raise LogError(f"{path}:{number}: not CSV: {error}") from None


def _without_run(column: str) -> str:
    """W&B's exports put the name of the run before that of the column: "run-1 - train/loss"."""
    return column.rpartition(" - ")[2].strip()


def read_json_lines(path: Path, warnings: list[str]) -> Table:
    table = Table()
    for number, line in lines_of(path, warnings):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            why = f"expected a JSON object, but got {shown(value)}"
        except (ValueError, RecursionError) as error:
            value, why = None, f"not JSON: {error}"
        if not isinstance(value, dict):
            if not line.endswith("\n"):
                warnings.append(f"{path}:{number}: {_TORN}")
                break
            raise LogError(f"{path}:{number}: {why}")
        table.add(f"{path}:{number}", _flat(value))
    return table


def read_json_array(path: Path, value: list[Any]) -> Table:
    table = Table()
    for place, row in enumerate(value):
        if not isinstance(row, dict):
            raise LogError(f"{path}: expected objects in the array, but got {shown(row)} at place {place}")
        table.add(f"{path}: place {place} of the array", _flat(row))
    return table


def parsed(path: Path) -> Any:
    """A file that is one JSON value; raises LogError if it is not."""
    text = text_of(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LogError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}: not JSON: {error}") from None


def _flat(row: dict[str, Any], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The mappings in a row as columns such as "train/loss"."""
    for key, value in row.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{prefix}{key}/", depth - 1)
        else:
            yield f"{prefix}{key}", value


def is_pairs(line: str) -> bool:
    """Whether a line is made of `name:number` as those of llm.c are: "s:0 trl:11.0 lr:0.1 norm:15.4"."""
    return _PAIRS.fullmatch(line.strip()) is not None


def read_pairs(path: Path, warnings: list[str]) -> Table:
    table = Table()
    for place, line in lines_of(path, warnings):
        if not line.strip() or line.startswith("#"):
            continue
        if not is_pairs(line):
            if not line.endswith("\n"):
                warnings.append(f"{path}:{place}: {_TORN}")
                break
            raise LogError(f"{path}:{place}: expected pairs of name:number, but got {shown(line.strip())}")
        pairs = (pair.partition(":") for pair in line.split())
        table.add(f"{path}:{place}", ((_SHORT.get(name, name), number) for name, _, number in pairs))
    return table


def records_of(path: Path, table: Table, warnings: list[str]) -> tuple[list[Record], dict[str, Any]]:
    """The records, and which column was taken for which field.

    Raises:
        LogError: no column is known; a cell is no number.
    """
    chosen = choose(dict.fromkeys(column for row in table.rows for column in row.cells))
    if not any(field in chosen for field in USABLE):
        if any(field_of(column) in USABLE for column in table.columns):
            return [], {}
        raise LogError(f"{path}: {told(table.columns)}")
    steps = _collect(path, table, chosen, warnings, numbered="step" not in chosen)
    if steps.counts_anew:
        column = chosen["step"][0]
        warnings.append(f"{path}: the steps of {column!r} begin anew: rows were counted")
        steps = _collect(path, table, chosen, warnings, numbered=True)
    elif "step" not in chosen:
        warnings.append(f"{path}: no column names the step: rows were counted, from 0")
    if steps.repeated:
        warnings.append(repeats_told(path, steps.repeated))
    return steps.records(), {f: its[0] if len(its) == 1 else its for f, its in chosen.items()}


def _collect(
    path: Path, table: Table, chosen: dict[str, list[str]], warnings: list[str], numbered: bool
) -> Steps:
    steps = Steps()
    step_column = chosen["step"][0] if not numbered else ""
    fields = [(field, its) for field, its in chosen.items() if field != "step"]
    count = unplaced = 0
    for row in table.rows:
        values = _values(row, fields)
        if not values:
            continue
        if numbered:
            step = count
        else:
            its = _parsed(row, step_column, step_of)
            if its is None:
                unplaced += 1
                continue
            step = its
        steps.add(step, values)
        count += 1
    if unplaced:
        warnings.append(f"{path}: {unplaced} rows without a step in {step_column!r} were left out")
    return steps


def _values(row: Row, fields: list[tuple[str, list[str]]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, columns in fields:
        numbers = [n for c in columns if c in row.cells and (n := _number(row, c, field)) is not None]
        if not numbers:
            continue
        if field == "lr":
            values[field] = numbers
        else:
            values[field] = numbers[0]
    return values


def _number(row: Row, column: str, field: str) -> float | None:
    if field != "time":
        return _parsed(row, column, number_of)
    try:
        return number_of(row.cells[column])
    except ValueError:
        return None  # a date: nothing depends on it


def _parsed(row: Row, column: str, parse: Any) -> Any:
    if column not in row.cells:
        return None
    try:
        return parse(row.cells[column])
    except ValueError as error:
        raise LogError(f"{row.place}: {column}: {error}") from None
