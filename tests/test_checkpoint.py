"""Checkpoints are whole or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from depthgrow.checkpoint import latest_checkpoint, save_checkpoint, verify
from depthgrow.files import UserError, require_space, whole_folder, write_atomic


def tensors(step, size=50):
    return {"a": torch.full((size,), float(step)), "b": torch.arange(size) * step}


def save(root, step):
    return save_checkpoint(root, tensors(step), {"m": torch.ones(3) * step}, {"step": step})


def test_round_trip_keeps_the_newest_two(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]
    found = latest_checkpoint(tmp_path)
    assert found.step == 3
    assert all(torch.equal(found.weights()[k], v) for k, v in tensors(3).items())
    assert torch.equal(found.optimizer()["m"], torch.full((3,), 3.0))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_damaged_file_is_named_and_the_older_one_taken(tmp_path, name):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-3])
    told = []
    assert latest_checkpoint(tmp_path, told.append).step == 1
    assert name in told[0]


def test_nothing_whole_left_is_an_error_with_the_remedy(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / "weights.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights\.safetensors is missing.*delete"):
        latest_checkpoint(tmp_path)


def test_empty_folder_is_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None


def test_kill_at_random_moments_of_a_save_always_leaves_a_whole_one(tmp_path):
    rng = random.Random(0)
    save_checkpoint(tmp_path, {"a": torch.zeros(200_000)}, {"m": torch.zeros(1000)}, {"step": 0})
    for _ in range(20):
        step = latest_checkpoint(tmp_path).step
        pid = os.fork()
        if pid == 0:
            while True:
                step += 1
                save_checkpoint(
                    tmp_path,
                    {"a": torch.full((200_000,), float(step))},
                    {"m": torch.full((1000,), float(step))},
                    {"step": step},
                )
        time.sleep(rng.uniform(0.01, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = latest_checkpoint(tmp_path)
        assert (found.weights()["a"] == found.step).all()
        assert (found.optimizer()["m"] == found.step).all()
    assert latest_checkpoint(tmp_path).step > 5


def test_no_disk_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"needs .* GiB but .* free"):
        require_space(tmp_path, 2**60, "a checkpoint")


def test_atomic_write_leaves_the_old_content_on_failure(tmp_path):
    path = tmp_path / "f"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 5)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_checkpoints_hold_no_pickle(tmp_path):
    found = save(tmp_path, 1)
    assert verify(found.path).step == 1
    code = "import sys; data = open(sys.argv[1], 'rb').read(); sys.exit(data[8:9] != b'{')"
    assert subprocess.run([sys.executable, "-c", code, str(found.path / "weights.safetensors")]).returncode == 0


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    final = tmp_path / "deep" / "final"
    with whole_folder(final) as scratch:
        (scratch / "a").write_text("1")
        assert not final.exists()
    with pytest.raises(FileNotFoundError), whole_folder(final) as scratch:
        (scratch / "none" / "b").write_text("2")
    assert [p.name for p in final.iterdir()] == ["a"]
    with whole_folder(final) as scratch:
        (scratch / "c").write_text("3")
    assert [p.name for p in final.iterdir()] == ["c"]
    with pytest.raises(OSError, match="not empty"), whole_folder(final, replace=False) as scratch:
        (scratch / "d").write_text("4")
    assert [p.name for p in final.iterdir()] == ["c"]
    (final / "c").unlink()
    with whole_folder(final, replace=False) as scratch:
        (scratch / "e").write_text("5")
    assert [p.name for p in final.iterdir()] == ["e"]
    assert [p.name for p in final.parent.iterdir()] == ["final"]  # no scratch is left
