"""Virtual time and drop-outs on actors are those of this process."""

import pytest

import rayfed

JOB = {
    "name": "run",
    "method": "scaffold",
    "data": {"partition": {"name": "shards", "s": 2, "num_clients": 10}},
    "model": "lenet",
    "train": {"num_rounds": 3, "clients_per_round": 3, "local_steps": 1, "batch_size": 10},
    "clients": {
        **{"available": 0.8, "dropout": 0.3, "oversample": 1.4, "deadline": 6.0},
        **{"seconds_per_example": 0.1, "bytes_per_second": 1e5, "spread": 0.5},
    },
}


@pytest.mark.slow
def test_any_number_of_actors_gives_the_rounds_of_this_process(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.experiment._write_page", lambda path: None)

    def rounds(name, **ray):
        job = {**JOB, "name": name, "ray": ray, "output": {"path": str(tmp_path)}}
        return rayfed.run(job).rounds.drop_columns("seconds").to_pylist()

    here = rounds("here", mode="off")
    assert rounds("one", address=cluster, actors=1) == rounds("three", address=cluster, actors=3) == here
    dropped, late = (sum(dict(row["notes"])[f"clients.{name}"] for row in here[1:]) for name in ("dropped", "late"))
    assert dropped and late
