"""What verl imports in each of its processes (entry point in the group `verl.plugins`). Keep it light.

verl logs an exception raised here at DEBUG level only and goes on without the plugin: `trustregion.verl_plugin.doctor`
is what makes that visible.
"""

import trustregion.verl_plugin.platform_cpu  # noqa: F401  registers the platform "cpu"
from trustregion.verl_plugin.names import LOSS_NAME
from trustregion.verl_plugin.policy_loss import trust_region_loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

if LOSS_NAME in POLICY_LOSS_REGISTRY:  # verl would overwrite it in silence
    other = POLICY_LOSS_REGISTRY[LOSS_NAME]
    raise RuntimeError(
        f"the policy loss {LOSS_NAME!r} is registered already, by {other.__module__}.{other.__qualname__}: "
        "uninstall that plugin, or rename its loss"
    )
register_policy_loss(LOSS_NAME)(trust_region_loss)
