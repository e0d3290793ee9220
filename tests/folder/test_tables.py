"""A reader of the tables finds each row once: while rounds are added, after a kill at any moment,
after resuming.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rayfed.folder import tables
from rayfed.folder.tables import SCHEMAS, read_table, replace_table, write_round

ROWS = dict.fromkeys(SCHEMAS["clients"].names, 0) | {"node": "here", "notes": []}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 5)


def add(path, *rounds):
    """Two clients in each round after round 0."""
    for round in rounds:
        rows = [{**ROWS, "round": round, "client": client} for client in range(2 if round else 0)]
        write_round(path, round, {"clients": rows})


def expected(last):
    return [(round, client) for round in range(1, last + 1) for client in range(2)]


def pairs(table):
    return [(row["round"], row["client"]) for row in table.to_pylist()]


def found(path):
    """The rows, the same for any Parquet reader as for ours."""
    ours, any_readers = read_table(path, "clients"), pq.read_table(path / "clients.parquet")
    assert ours == any_readers.combine_chunks()
    return pairs(ours)


def resume(path, checkpoint, last):
    """Continue after the round of a checkpoint up to the last."""
    replace_table(path, "clients", *checkpoint)
    add(path, *range(checkpoint[0] + 1, last + 1))


def test_rounds_share_files_and_adding_one_again_changes_nothing(tmp_path):
    for round in range(12):
        add(tmp_path, round)
        before = found(tmp_path)
        add(tmp_path, round)
        assert found(tmp_path) == before == expected(round)
    names = [f"round-{first:05d}.parquet" for first in (0, 4, 7, 10)]
    assert sorted(file.name for file in (tmp_path / "clients.parquet").iterdir()) == names
    for after in range(-1, 13):
        assert pairs(read_table(tmp_path, "clients", after)) == [
            pair for pair in expected(11) if pair[0] > after
        ]


class Dies(Exception):
    pass


def mortal(monkeypatch, changes):
    """Let this process die before its n-th change to the disk, half-way if that writes a file."""
    left = [changes]

    def dying(change):
        def step(*arguments, **options):
            left[0] -= 1
            if left[0] == -1 and change is write:
                write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if left[0] < 0:
                raise Dies
            return change(*arguments, **options)

        return step

    write = Path.write_bytes
    for owner, name in ((Path, "write_bytes"), (Path, "unlink"), (Path, "mkdir"), (os, "replace")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


def test_a_kill_at_any_change_neither_loses_nor_doubles_a_row(tmp_path, monkeypatch):
    for changes in range(100):
        (path := tmp_path / str(changes)).mkdir()
        with monkeypatch.context() as patch, suppress(Dies):
            mortal(patch, changes)
            for last in range(10):
                add(path, last)
            break
        if last:
            assert found(path) in (expected(last - 1), expected(last))
        add(path, *range(last, 10))
        assert found(path) == expected(9)
    assert changes > 20


def test_a_kill_at_any_change_of_a_resumed_run_loses_nothing_that_its_checkpoint_holds(
    tmp_path, monkeypatch
):
    (whole := tmp_path / "whole").mkdir()
    add(whole, *range(6))
    checkpoint = 5, read_table(whole, "clients")
    add(whole, *range(6, 12))
    for changes in range(100):
        path = shutil.copytree(whole, tmp_path / str(changes))
        with monkeypatch.context() as patch, suppress(Dies):
            mortal(patch, changes)
            resume(path, checkpoint, 8)
            break
        rows = found(path)
        assert len(rows) >= 10 and rows == expected(len(rows) // 2)
        resume(path, checkpoint, 8)
        assert found(path) == expected(8)
    assert changes > 8


def test_a_reader_that_listed_the_files_before_they_changed_finds_each_row_once(
    tmp_path, monkeypatch
):
    for listed in range(9):
        for read in range(listed, 9):
            (path := tmp_path / f"{listed}-{read}").mkdir()
            add(path, *range(listed + 1))
            another = ds.dataset(path / "clients.parquet")
            listing = tables._files(path / "clients.parquet")
            add(path, *range(listed + 1, read + 1))
            assert pairs(another.to_table()) in (expected(last) for last in range(listed, read + 1))
            with monkeypatch.context() as patch:
                patch.setattr(tables, "_files", lambda folder, listing=listing: listing)
                assert pairs(read_table(path, "clients")) in (
                    expected(last) for last in range(listed, read + 1)
                )


def test_a_reader_looks_again_where_a_resumed_run_has_dropped_rounds(tmp_path, monkeypatch):
    add(tmp_path, *range(6))
    checkpoint = 5, read_table(tmp_path, "clients")
    add(tmp_path, *range(6, 12))
    listings = [tables._files(tmp_path / "clients.parquet")]
    replace_table(tmp_path, "clients", *checkpoint)
    files = tables._files
    monkeypatch.setattr(
        tables, "_files", lambda folder: listings.pop() if listings else files(folder)
    )
    assert pairs(read_table(tmp_path, "clients")) == expected(5)


def test_resuming_heals_files_that_a_power_cut_has_damaged(tmp_path):
    add(tmp_path, *range(9))
    checkpoint = 8, read_table(tmp_path, "clients")
    first, *_, last = sorted((tmp_path / "clients.parquet").iterdir())
    first.write_bytes(b"PAR1")
    last.write_bytes(b"")
    resume(tmp_path, checkpoint, 9)
    assert found(tmp_path) == expected(9)


def test_a_file_that_has_exactly_the_rows_of_a_full_one_is_not_touched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 4)
    add(tmp_path, *range(3))
    first = tmp_path / "clients.parquet/round-00000.parquet"
    before = first.read_bytes()
    add(tmp_path, 3)
    names = sorted(file.name for file in first.parent.iterdir())
    assert names == ["round-00000.parquet", "round-00003.parquet"]
    assert first.read_bytes() == before
    assert found(tmp_path) == expected(3)


def test_no_file_is_left_of_rounds_after_the_checkpoint(tmp_path):
    """A file begins with round 4: the checkpoint is of the round before, of this one, or of the
    next.
    """
    for checkpoint in (3, 4, 5):
        path = tmp_path / str(checkpoint)
        path.mkdir()
        add(path, *range(checkpoint + 1))
        saved = read_table(path, "clients")
        add(path, *range(checkpoint + 1, 9))
        replace_table(path, "clients", checkpoint, saved)
        names = sorted(file.name for file in (path / "clients.parquet").iterdir())
        assert names == [f"round-{first:05d}.parquet" for first in (0, 4) if first <= checkpoint]
        assert found(path) == expected(checkpoint)


def test_resuming_writes_nothing_through_a_link(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "clients.parquet").symlink_to(tmp_path / "away", target_is_directory=True)
    with pytest.raises(OSError, match=r"clients\.parquet' is a link"):
        replace_table(tmp_path, "clients", 0, SCHEMAS["clients"].empty_table())
    assert not list((tmp_path / "away").iterdir())
