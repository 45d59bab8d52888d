"""From which checkpoint a run starts, and that it never starts from step 0 by accident."""

import shutil

import pytest
from omegaconf import OmegaConf

from recipes.errors import UserError
from recipes.launcher import make_run_dir
from recipes.resume import choose_start
from trustregion.verl_plugin.checkpoints import check, seal


@pytest.fixture
def run(configure, tmp_path):
    """run(*overrides, steps=[...]) -> (its config.trainer, what was said); run.save(step) makes a whole checkpoint."""

    def run(*overrides, steps=(), name="x", elsewhere=None):
        config = configure(f"name={name}", f"runs={tmp_path}", "trainer.resume_mode=auto", *overrides)
        if elsewhere:
            config.trainer.default_local_dir = str(elsewhere)
        make_run_dir(config)
        said = []
        choose_start(config, list(steps), said.append)
        OmegaConf.save(config, tmp_path / name / "config.yaml", resolve=True)
        return config.trainer, "\n".join(said)

    def save(step, name="x", workers=1, root=None):
        folder = (root or tmp_path / name / "checkpoints") / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        for rank in range(workers):
            (folder / "actor" / f"model_world_size_{workers}_rank_{rank}.pt").write_bytes(b"weights")
        (folder / "data.pt").write_bytes(b"data")
        seal(folder)
        return folder

    run.save = save
    return run


def test_a_run_that_has_done_nothing_starts(run):
    trainer, said = run()
    assert (trainer.resume_mode, trainer.resume_from_path, said) == ("disable", None, "")


def test_the_last_whole_checkpoint_is_taken_and_the_others_are_named(run):
    for step in (2, 4, 10, 12):
        newest = run.save(step)
    (newest / "manifest.json").unlink()
    (newest.with_name("global_step_10") / "data.pt").write_bytes(b"dato")
    trainer, said = run("trainer.val_before_train=true", steps=range(1, 13))
    assert (trainer.resume_mode, trainer.val_before_train) == ("resume_path", False)
    assert trainer.resume_from_path.endswith("checkpoints/global_step_4")
    assert "skipped: global_step_12 has no manifest.json" in said
    assert "skipped: global_step_10 data.pt is damaged" in said
    assert "goes on from the checkpoint of step 4" in said
    # 10 will be trained again, and must not be taken for what it was even if it were whole.
    assert not (newest.with_name("global_step_10") / "manifest.json").exists()


def test_without_a_whole_checkpoint_it_does_not_start_from_step_0_by_accident(run):
    with pytest.raises(UserError, match="3 steps of metrics.*restart_without_checkpoint=true"):
        run(steps=[1, 2, 3])
    (run.save(2) / "data.pt").unlink()
    with pytest.raises(UserError, match=r"(?s)restart_without_checkpoint=true.*global_step_2 lacks data.pt"):
        run()
    trainer, said = run("restart_without_checkpoint=true", steps=[1, 2])
    assert trainer.resume_mode == "disable" and "starts from step 0" in said


def test_a_checkpoint_of_other_workers_is_refused(run):
    run.save(2, workers=2)
    with pytest.raises(UserError, match="cluster.workers = 1.*written by 2 workers"):
        run()


def given(folder):
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


def test_going_back_in_the_own_folder_gives_up_what_came_later(run):
    first, second = run.save(2), run.save(4)
    trainer, _ = run(*given(first), steps=[1, 2, 3, 4])
    assert trainer.resume_from_path == str(first)
    trainer, said = run(steps=[1, 2, 3])
    assert trainer.resume_from_path == str(first) and "skipped: global_step_4" in said
    assert (second / "data.pt").exists()


def test_pickles_of_another_folder_are_loaded_only_when_trusted(run, tmp_path):
    folder = run.save(2, name="other")
    with pytest.raises(UserError, match="outside the run's folder.*trust_checkpoint=true"):
        run(*given(folder))
    shutil.rmtree(tmp_path / "x")
    trainer, _ = run(*given(folder), "trust_checkpoint=true", "trainer.val_before_train=true")
    assert trainer.resume_from_path == str(folder) and trainer.val_before_train
    check(folder)
    (tmp_path / "x" / "checkpoints").mkdir()
    (tmp_path / "x" / "checkpoints" / "global_step_3").symlink_to(folder)
    with pytest.raises(UserError, match="trust_checkpoint=true"):
        run(steps=[1, 2, 3])


def test_a_given_checkpoint_must_be_whole(run, tmp_path):
    folder = run.save(2, name="other")
    (folder / "data.pt").unlink()
    with pytest.raises(UserError, match="lacks data.pt"):
        run(*given(folder), "trust_checkpoint=true")
    shutil.rmtree(tmp_path / "x")
    (folder / "manifest.json").unlink()  # of plain verl
    _, said = run(*given(folder), "trust_checkpoint=true")
    assert "whether it is whole is not known" in said
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(UserError, match="no such checkpoint"):
        run(*given(tmp_path / "global_step_7"), "trust_checkpoint=true")


def test_a_run_goes_on_as_itself_alone(run, tmp_path):
    run()
    run.save(2)
    config = (tmp_path / "x" / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"(?s)allow_changes=true.*actor_rollout_ref.actor.optim.lr = 0.0002 there, 0.5 here.*method.delta = 0.05 there, 0.1 here"):
        run("method.delta=0.1", "actor_rollout_ref.actor.optim.lr=0.5", steps=[1, 2])
    assert (tmp_path / "x" / "config.yaml").read_text() == config
    _, said = run("method.delta=0.1", "allow_changes=true", steps=[1, 2])
    assert "changed: method.delta = 0.05 there, 0.1 here" in said
    with pytest.raises(UserError, match="method.delta = 0.1 there, 0.05 here"):
        run(steps=[1, 2])


def test_it_may_train_longer_save_more_often_and_be_looked_at_more_closely(run):
    run("trainer.save_freq=2", "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-6")
    run.save(2)
    more = ["trainer.total_training_steps=9", "trainer.save_freq=1", "trainer.test_freq=3", "trainer.logger=[file]", "token_records.every=1", "max_restarts=2", "+cluster.env.NCCL_DEBUG=INFO"]
    _, said = run(*more, "actor_rollout_ref.actor.optim.lr=1e-6", steps=[1, 2])
    assert said.startswith("goes on from the checkpoint of step 2")


def test_where_the_configuration_was_lost_this_is_said(run, tmp_path):
    run()
    run.save(2)
    (tmp_path / "x" / "config.yaml").write_text("a: [")
    assert "note: config.yaml cannot be read" in run("method.delta=0.1", steps=[1, 2])[1]


def test_checkpoints_that_a_run_saved_elsewhere_are_its_own(run, tmp_path):
    folder = run.save(2, root=tmp_path / "scratch")
    with pytest.raises(UserError, match="trust_checkpoint=true"):
        run(elsewhere=tmp_path / "scratch")  # it has saved nothing yet: another run did
    run(elsewhere=tmp_path / "scratch2")
    (tmp_path / "scratch").rename(tmp_path / "scratch2")
    trainer, _ = run(elsewhere=tmp_path / "scratch2", steps=[1, 2])
    assert trainer.resume_from_path == str(tmp_path / "scratch2" / folder.name)
    run(*given(trainer.resume_from_path), elsewhere=tmp_path / "scratch2", steps=[1, 2])
