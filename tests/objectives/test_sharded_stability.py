"""The stability term on two processes, where one of them may have no row to probe."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    program = Path(__file__).with_name("sharded_stability.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_processes_make_the_gradient_of_one(found):
    differences = {name: value for name, value in found.items() if isinstance(value, float)}
    assert len(differences) == 6
    assert max(differences.values()) < 1e-12, differences


def test_exact_products_refuse_shards(found):
    refused = [value for value in found.values() if isinstance(value, str)]
    assert len(refused) == 2
    assert all("cannot go through FSDP's shards; take 'finite_difference'" in message for message in refused)
