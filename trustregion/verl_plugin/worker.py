"""verl's actor/rollout worker with two additions: our `WorkerLoss`, and gloo alone where there is only a CPU."""

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import TrainingWorker

from trustregion.verl_plugin.token_records import TokenRecorder
from trustregion.verl_plugin.worker_loss import WorkerLoss


class TrustRegionTrainingWorker(TrainingWorker):
    def __init__(self, config):
        import trustregion.verl_plugin.engine  # noqa: F401  registers our engines

        if get_device_name() == "cpu":
            # verl would ask torch for the backend "cpu:gloo,cpu:gloo", which torch refuses. The process group made
            # here, by verl's own function, is the one it then finds.
            initialize_global_process_group_ray(timeout_second=None, backend="gloo")
        super().__init__(config)


class TrustRegionWorker(DetachActorWorker):
    """verl's worker, in the variant that can also put weights aside, as its separate trainer has it do."""

    actor_worker_cls = TrustRegionTrainingWorker
    ref_worker_cls = TrustRegionTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        super().init_model()
        if self.actor is not None:
            engine, recorder = self.actor.engine, None
            if engine.is_mp_src_rank_with_outputs():  # of workers that share their sequences, the first
                group = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
                recorder = TokenRecorder(self.actor.model_config.tokenizer, *group)
            self.actor.set_loss_fn(WorkerLoss(self.loss_fn, self.loss_fn.keywords["config"].policy_loss, recorder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_folder(self, folder):
        """Writes `folder`/huggingface, a model that transformers loads, by verl's way of saving one in a checkpoint."""
        manager = self.actor.engine.checkpoint_manager
        contents, manager.checkpoint_save_contents = manager.checkpoint_save_contents, ["hf_model"]
        try:
            self.actor.engine.save_checkpoint(folder)
        finally:
            manager.checkpoint_save_contents = contents

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n):
        super().save_model_to_cpu(n)
        if get_device_name() == "cpu":  # where verl's copy to the CPU is none: what it put aside would go on being trained
            parts, spec = self.cpu_saved_models[n]
            self.cpu_saved_models[n] = {name: (part.clone(), own) for name, (part, own) in parts.items()}, spec
