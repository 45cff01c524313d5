"""verl runs -> an SQL database: PostgreSQL, TimescaleDB, SQLite. SQLAlchemy Core.

A row for each value that verl has logged, and one for each attempt of a run; `verl_rank_statistics` shows the values
over ranks side by side. A request is one transaction; rows have keys, so that one delivered again changes nothing.
"""

import json
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, SQLAlchemyError

from verl_otel.bridges.events import RunEvent, RunIdentity
from verl_otel.bridges.sink import Refused, TryLater
from verl_otel.semconv import attributes as attr

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Of the tables; in `verl_schema`. A database of a later one is left alone."""

ROWS_PER_STATEMENT = 2000
_HANDLED = frozenset({attr.EVENT_STEP, attr.EVENT_RUN_STARTED, attr.EVENT_RUN_FINISHED})
_INSERT = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Row: TypeAlias = dict[str, Any]

tables = sa.MetaData()
_time = sa.DateTime(timezone=True)


def _of_run() -> tuple[sa.Column[Any], ...]:
    return sa.Column("run_id", sa.Text, primary_key=True), sa.Column("attempt", sa.BigInteger, primary_key=True)


schema = sa.Table("verl_schema", tables, sa.Column("version", sa.Integer, primary_key=True))
runs = sa.Table(
    "verl_runs",
    tables,
    *_of_run(),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("experiment", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("verl_version", sa.Text),
    sa.Column("started", _time),
    sa.Column("finished", _time),
    sa.Column("error", sa.Text),
    sa.Index("verl_runs_project", "project", "experiment"),
)
parameters = sa.Table(
    "verl_parameters",
    tables,
    *_of_run(),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
values = sa.Table(
    "verl_values",
    tables,
    *_of_run(),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("time", _time, primary_key=True),  # verl may log a key twice in a step; TimescaleDB wants it in the key
    sa.Column("value", sa.Double),
    sa.Column(
        "non_finite", sa.Text
    ),  # NaN, Infinity, -Infinity: SQLite has no NaN, and an average is not to become one
)

_STATISTICS = ("mean", "std", "min", "max", "min_rank", "max_rank")
_QUANTITY = "substr(key, 12, length(key) - 12 - length(statistic))"  # of verl.ranks/<quantity>/<statistic>
_RANK_STATISTICS = f"""
    CREATE VIEW verl_rank_statistics AS
    SELECT run_id, attempt, step, {_QUANTITY} AS quantity,
        {", ".join(f"max(CASE statistic WHEN '{name}' THEN value END) AS {name}" for name in _STATISTICS)}
    FROM verl_values
    JOIN ({" UNION ALL ".join(f"SELECT '{name}' AS statistic" for name in _STATISTICS)}) AS statistics
        ON key LIKE 'verl.ranks/%/' || statistic
    GROUP BY run_id, attempt, step, {_QUANTITY}
"""


class WrongDatabase(Exception):
    """A URL that names no database of ours; the message says what to do."""


def _check_file(path: str) -> None:
    if path == ":memory:":
        raise WrongDatabase(
            "a database in memory goes with the bridge; give a file, such as sqlite:////var/lib/verl.db"
        )
    folder = Path(path).absolute().parent
    if not path.startswith("file:") and not folder.is_dir():
        raise WrongDatabase(
            f"there is no folder {folder}: make it, or correct the URL (four slashes: an absolute path)"
        )


class SqlSink:
    """The database at an SQLAlchemy URL, such as `postgresql://user@host/db` or `sqlite:////var/lib/verl.db`.

    Nothing is connected to before the first events come.

    Raises:
        WrongDatabase: the URL cannot be used.
        ImportError: the database's driver is not installed.
    """

    name = "the SQL database"

    def __init__(self, url: str) -> None:
        try:
            parsed = sa.make_url(url)
            backend = parsed.get_backend_name()
            if backend not in _INSERT:
                raise WrongDatabase(f"{backend} is not supported; use postgresql or sqlite")
            if backend == "sqlite":
                _check_file(parsed.database or ":memory:")
            if backend == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg", query={"connect_timeout": "10", **parsed.query})
            # A connection is tested before its use: one that a restart of the database has cut is no lost request.
            self._engine = sa.create_engine(parsed, pool_pre_ping=True, hide_parameters=True, pool_timeout=10)
        except ArgumentError as error:  # its message may have the URL, and so the password
            raise WrongDatabase("the URL cannot be read; use postgresql://user@host/db or sqlite:///file") from error
        self._insert = _INSERT[backend]
        self._ready = False
        self._lock = threading.Lock()

    def handle(self, events: Sequence[RunEvent]) -> int:
        """See `Sink`."""
        try:
            self._prepare()
            with self._engine.begin() as connection:
                return self._write(connection, events)
        except DataError as error:
            raise Refused(f"the SQL database does not take this: {_message(error)}") from error
        except SQLAlchemyError as error:  # away, full, read-only, a right that is missing: the data is not at fault
            raise TryLater(f"the SQL database did not take it: {_message(error)}") from error

    def _prepare(self) -> None:
        """Make the tables, once."""
        with self._lock:
            if self._ready:
                return
            with self._engine.begin() as connection:
                tables.create_all(connection)
                found = connection.execute(sa.select(sa.func.max(schema.c.version))).scalar()
                if found is None:
                    connection.execute(sa.text("DROP VIEW IF EXISTS verl_rank_statistics"))
                    connection.execute(sa.text(_RANK_STATISTICS))
                    self._make_hypertable(connection)
                    connection.execute(self._insert(schema).values(version=SCHEMA).on_conflict_do_nothing())
                elif found > SCHEMA:
                    raise TryLater(f"the SQL database has tables of version {found}, later than {SCHEMA}: "
                                   "update verl-otel here")  # fmt: skip
            self._ready = True

    def _make_hypertable(self, connection: sa.Connection) -> None:
        if connection.dialect.name != "postgresql":
            return
        if connection.execute(sa.text("SELECT count(*) FROM pg_proc WHERE proname = 'create_hypertable'")).scalar():
            connection.execute(sa.text("SELECT create_hypertable('verl_values', 'time', if_not_exists => TRUE)"))
            logger.info("verl_values is a TimescaleDB hypertable")

    def _write(self, connection: sa.Connection, events: Sequence[RunEvent]) -> int:
        ignored = 0
        seen: dict[tuple[Any, ...], Row] = {}
        points: dict[tuple[Any, ...], Row] = {}
        for event in events:
            identity, is_step = event.identity(), event.name == attr.EVENT_STEP
            if identity is None or event.name not in _HANDLED or (is_step and event.step() is None):
                ignored += 1
                continue
            run = _run_row(identity, event)
            key = {"run_id": run["run_id"], "attempt": run["attempt"]}
            if is_step:
                seen[tuple(key.values())] = run
                for row in _value_rows(key, event):
                    points.setdefault(tuple(row[column.name] for column in values.primary_key), row)
            elif event.name == attr.EVENT_RUN_STARTED:
                self._upsert(connection, {**run, "started": _when(event)}, but=("state",))
                self._insert_new(connection, parameters, _parameter_rows(key, event))
            else:
                self._upsert(connection, {**run, **_end(event)})
        # In one order everywhere: two requests that write the same rows never wait for each other.
        self._insert_new(connection, runs, [seen[key] for key in sorted(seen)])
        self._insert_new(connection, values, [points[key] for key in sorted(points)])
        return ignored

    def _upsert(self, connection: sa.Connection, row: Row, but: tuple[str, ...] = ()) -> None:
        """Write a run's row; what an event delivered late must not change is named by `but`."""
        statement = self._insert(runs).values(row)
        changed = {name: statement.excluded[name] for name in row if name not in ("run_id", "attempt", *but)}
        connection.execute(statement.on_conflict_do_update(index_elements=["run_id", "attempt"], set_=changed))

    def _insert_new(self, connection: sa.Connection, table: sa.Table, rows: list[Row]) -> None:
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            statement = self._insert(table).on_conflict_do_nothing()
            connection.execute(statement, rows[start : start + ROWS_PER_STATEMENT])


def _run_row(identity: RunIdentity, event: RunEvent) -> Row:
    return {
        "run_id": _text(identity.run_id),
        "attempt": event.attempt(),
        "project": _text(identity.project),
        "experiment": _text(identity.experiment),
        "state": "running",
        "verl_version": _text(event.resource.get(attr.VERL_VERSION)),
    }


def _end(event: RunEvent) -> Row:
    error = {key: value for key, value in event.body.items() if key.startswith("exception.")}
    return {
        "state": _text(event.attributes.get(attr.RUN_STATE) or "finished"),
        "finished": _when(event),
        "error": _text(json.dumps(error, ensure_ascii=False, default=str)) if error else None,
    }


def _parameter_rows(key: Row, event: RunEvent) -> list[Row]:
    return [{**key, "key": _text(name), "value": _text(value)} for name, value in sorted(event.body.items())]


def _value_rows(key: Row, event: RunEvent) -> Iterator[Row]:
    for name, value in event.numbers().items():
        finite = math.isfinite(value)
        yield {
            **key,
            "key": _text(name),
            "step": event.step(),
            "time": _when(event),
            "value": value if finite else None,
            "non_finite": None if finite else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity",
        }


def _when(event: RunEvent) -> datetime:
    return _EPOCH + timedelta(microseconds=event.time_ns // 1000)


def _text(value: Any) -> str | None:
    """As text; PostgreSQL takes no NUL in it."""
    return None if value is None else str(value).replace("\0", "\N{REPLACEMENT CHARACTER}")


def _message(error: SQLAlchemyError) -> str:
    """What the database said, without the statement and its values."""
    return str(getattr(error, "orig", None) or type(error).__name__).strip().partition("\n")[0][:300]
