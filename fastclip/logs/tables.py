# SPDX-License-Identifier: BSD-3-Clause
"""Tables of numbers, read from CSV, JSON lines, a JSON array or lines of `name:number`, and as records."""

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
from .columns import USABLE, choose_columns, field_of, no_usable_column
from .merge_steps import StepMerger, repeated_steps_warning
from .parse_numbers import parse_number, parse_step, short_repr
from .text_files import read_lines, read_text

# Columns that name the data of a row, and the beginnings of names of data that are not for training.
_SPLITS = ("split", "mode", "phase", "stage", "subset")
_NOT_TRAINING = ("val", "eval", "test", "dev")
_DEPTH = 3
# The abbreviations of llm.c.
_SHORT = {"s": "step", "trl": "train_loss"}
_PAIRS = re.compile(r"(?:[A-Za-z_]\w*:[^\s:]+\s+)*[A-Za-z_]\w*:[^\s:]+")
# The file was cut off while it was written.
_TORN = "the last line is incomplete and was ignored"


@dataclass(slots=True)
class TableRow:
    """The cells of a row that may be fields of a record, by column, and the row's place for messages."""

    place: str
    cells: dict[str, Any]


class Table:
    """All rows of a file.

    Attributes:
        columns: all columns in the order of appearance, and whether each may be a field.
        rows: the rows, with the cells that are not empty and whose column may be a field.
    """

    def __init__(self) -> None:
        self.columns: dict[str, bool] = {}
        self.rows: list[TableRow] = []

    def add(self, place: str, cells: Iterable[tuple[str, Any]]) -> None:
        """Add a row, unless it has no useful cell or its data are not for training."""
        known = self.columns
        kept = {}
        for column, value in cells:
            useful = known.get(column)
            if useful is None:
                useful = known[column] = field_of(column) is not None
            if useful and value is not None and value != "":
                kept[column] = value
            elif isinstance(value, str) and column.lower() in _SPLITS:
                if value.lower().startswith(_NOT_TRAINING):
                    return
        if kept:
            self.rows.append(TableRow(place, kept))


def read_csv(path: Path, warnings: list[str]) -> Table:
    """Read cells separated by commas, semicolons or tabs, after a header; lines starting with # are ignored.

    Raises:
        LogError: the header has no usable column or one twice; a line is damaged other than at the end.
    """
    table = Table()
    lines = ((n, line) for n, line in read_lines(path, warnings) if line.strip() and not line.startswith("#"))
    number, header = next(lines, (1, ""))
    separator = max(",;\t", key=header.count)
    columns = [_without_run(column) for column in _cells(path, number, header, separator)]
    if not any(field_of(column) in USABLE for column in columns):
        raise LogError(f"{path}:{number}: {no_usable_column(columns)}")
    if twice := {c for c in columns if columns.count(c) > 1 and field_of(c) in USABLE}:
        raise LogError(f"{path}:{number}: expected one run, but got several columns {sorted(twice)[0]!r}")
    table.add("", ((column, None) for column in columns))  # the columns are known even if no row follows
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
    """Return a column of a W&B export without the name of the run: "train/loss" of "run-1 - train/loss"."""
    return column.rpartition(" - ")[2].strip()


def read_json_lines(path: Path, warnings: list[str]) -> Table:
    """Read a JSON object a line. Raises LogError if a line is damaged, other than at the end."""
    table = Table()
    for number, line in read_lines(path, warnings):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            why = f"expected a JSON object, but got {short_repr(value)}"
        except (ValueError, RecursionError) as error:
            value, why = None, f"not JSON: {error}"
        if not isinstance(value, dict):
            if not line.endswith("\n"):
                warnings.append(f"{path}:{number}: {_TORN}")
                break
            raise LogError(f"{path}:{number}: {why}")
        table.add(f"{path}:{number}", _flat(value))
    return table


def read_json_array(path: Path) -> Table:
    """Read a JSON array of objects. Raises LogError if the file is something else."""
    table = Table()
    for index, row in enumerate(load_json(path)):
        if not isinstance(row, dict):
            raise LogError(
                f"{path}: expected objects in the array, but got {short_repr(row)} at index {index}"
            )
        table.add(f"{path}: index {index} of the array", _flat(row))
    return table


def load_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises LogError if it is not one."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LogError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}: not JSON: {error}") from None


def _flat(row: dict[str, Any], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a row, those of nested mappings under columns such as "train/loss"."""
    for key, value in row.items():
        if isinstance(value, dict) and depth:
            yield from _flat(value, f"{prefix}{key}/", depth - 1)
        else:
            yield f"{prefix}{key}", value


def is_pairs(line: str) -> bool:
    """Return whether a line has pairs of name:number, as llm.c prints them: "s:0 trl:11.0 norm:15.4"."""
    return _PAIRS.fullmatch(line.strip()) is not None


def read_pairs(path: Path, warnings: list[str]) -> Table:
    """Read lines of name:number pairs. Raises LogError if a line is damaged, other than at the end."""
    table = Table()
    for number, line in read_lines(path, warnings):
        if not line.strip() or line.startswith("#"):
            continue
        if not is_pairs(line):
            if not line.endswith("\n"):
                warnings.append(f"{path}:{number}: {_TORN}")
                break
            got = short_repr(line.strip())
            raise LogError(f"{path}:{number}: expected pairs of name:number, but got {got}")
        pairs = (pair.partition(":") for pair in line.split())
        table.add(f"{path}:{number}", ((_SHORT.get(name, name), value) for name, _, value in pairs))
    return table


def table_records(path: Path, table: Table, warnings: list[str]) -> tuple[list[Record], dict[str, Any]]:
    """Return the records of a table, and which column was read as which field.

    Raises:
        LogError: no column is usable, or a cell is not a number.
    """
    chosen = choose_columns(dict.fromkeys(column for row in table.rows for column in row.cells))
    if not any(field in chosen for field in USABLE):
        if any(field_of(column) in USABLE for column in table.columns):
            return [], {}
        raise LogError(f"{path}: {no_usable_column(table.columns)}")
    steps = _merge(path, table, chosen, warnings, numbered="step" not in chosen)
    if steps.restarts_often:
        column = chosen["step"][0]
        warnings.append(f"{path}: the steps in column {column!r} restart: rows were numbered from 0 instead")
        steps = _merge(path, table, chosen, warnings, numbered=True)
    elif "step" not in chosen:
        warnings.append(f"{path}: no column holds the step: rows were numbered from 0")
    if steps.repeated:
        warnings.append(repeated_steps_warning(path, steps.repeated))
    return steps.records(), {f: its[0] if len(its) == 1 else its for f, its in chosen.items()}


def _merge(
    path: Path, table: Table, chosen: dict[str, list[str]], warnings: list[str], numbered: bool
) -> StepMerger:
    steps = StepMerger()
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
            its = _parsed(row, step_column, parse_step)
            if its is None:
                unplaced += 1
                continue
            step = its
        steps.add(step, values)
        count += 1
    if unplaced:
        warnings.append(f"{path}: ignored rows without a step in column {step_column!r}: {unplaced}")
    return steps


def _values(row: TableRow, fields: list[tuple[str, list[str]]]) -> dict[str, Any]:
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


def _number(row: TableRow, column: str, field: str) -> float | None:
    if field != "time":
        return _parsed(row, column, parse_number)
    try:
        return parse_number(row.cells[column])
    except ValueError:
        return None  # a date; nothing depends on it


def _parsed(row: TableRow, column: str, parse: Any) -> Any:
    if column not in row.cells:
        return None
    try:
        return parse(row.cells[column])
    except ValueError as error:
        raise LogError(f"{row.place}: {column}: {error}") from None
