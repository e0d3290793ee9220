"""What is typed that the command line does not know, and what to type instead."""

import pytest

from rayfed.cli import main
from rayfed.cli.usage import MEANT


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run", "give a job file, or the example: rayfed run quickstart"),
        ("submit", "give a job file, or the example: rayfed submit quickstart"),
        ("train job.toml", "no command 'train'; did you mean 'run'?"),
        ("tabel x", "no command 'tabel'; did you mean 'table'?"),
        ("zzz", "no command 'zzz'; `rayfed --help` lists all"),
        (
            "run job.toml --method fedavg",
            "no option --method; write -s method=VALUE",
        ),
        ("run job.toml --num-rounds 3", "write -s train.num_rounds=VALUE"),
        ("run job.toml --alpha 3", "write -s data.partition.alpha=VALUE"),
        ("run job.toml --model cnn", "no option --model; write -s model=VALUE"),
        ("run job.toml --zzz", "No such option"),
        (
            "run job.toml train.num_rounds=3",
            "'train.num_rounds=3': write -s train.num_rounds=3",
        ),
        ("run job.toml name=boss seed=1", "'name=boss seed=1': write -s name=boss -s seed=1"),
        ("run job.toml name=a b", "'name=a b': write each setting as -s KEY=VALUE"),
        ("run job.toml other.toml", "unexpected extra argument"),
        ("run .", "'.' is a folder; give a job file in it, such as 'job.toml'"),
        ("data mnistt", "no data set or job file 'mnistt'; did you mean 'mnist'?"),
        ("figure accuracy x", "no kind of figure 'accuracy'; did you mean 'curves'?"),
        ("figure accuracy x", "\nto draw accuracy, type: rayfed figure curves x\n"),
        ("figure loss", "\nto draw loss, type: rayfed figure curves --of test_loss RUN\n"),
    ],
)
def test_a_mistake_is_told_with_what_to_type(folder, rayfed, words, says):
    ended = rayfed(*words.split())
    assert ended.exit_code == 2 and says in ended.stderr, ended.stderr


def test_each_command_that_is_meant_exists_and_no_name_is_taken_twice():
    assert set(MEANT.values()) <= main.commands.keys() and not MEANT.keys() & main.commands.keys()
