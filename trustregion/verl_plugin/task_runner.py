"""The process that holds the trainer: verl's own task runner, which knows our trainer and our rollout servers."""

from verl.trainer.main_ppo import TaskRunnerV1


class TrustRegionTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    def run(self, config):
        import trustregion.verl_plugin.trainer  # noqa: F401  registers it in this process
        from trustregion.verl_plugin.rollout_server import register

        register()
        super().run(config)
