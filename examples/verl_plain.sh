#!/usr/bin/env bash
# The loss in plain verl: verl's own trainer and workers, the loss chosen by configuration alone.
#
#   examples/verl_plain.sh actor_rollout_ref.model.path=... data.train_files=... data.val_files=...
#   METHOD=dppo_binary_tv examples/verl_plain.sh ... actor_rollout_ref.actor.policy_loss.method.delta=0.2
#
# METHOD names a file of configs/method, whose fields become keys of verl's configuration; they are checked before
# anything starts. The library must be installed in the Python that runs verl, on every node.
set -euo pipefail
method=${METHOD:-band_kl}

# Methods anchored on the policy that sampled (DPPO) need the rollout engine's log-probs as old ones: verl's bypass mode.
read -r anchored_on_rollout configs < <(python - "$method" <<'PYTHON'
import sys
from trustregion.presets import configs_folder, load_preset
print(load_preset(sys.argv[1]).anchor == "rollout", configs_folder())
PYTHON
)

exec python -m verl.trainer.main_ppo \
    actor_rollout_ref.actor.policy_loss._target_=trustregion.verl_plugin.config.TrustRegionLossConfig \
    actor_rollout_ref.actor.policy_loss.loss_mode=trust_region \
    "hydra.searchpath=[file://$configs]" "+method@actor_rollout_ref.actor.policy_loss.method=$method" \
    algorithm.rollout_correction.bypass_mode="$anchored_on_rollout" \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    "$@"
