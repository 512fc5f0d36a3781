"""Does what is around a step (layer 3): builds units, shows full parameters, and controls units from outside."""

from fsdp_flat.runtime.activation_offload import offload_activations
from fsdp_flat.runtime.arguments import (
    check_callable,
    listed,
    precision_of_policy,
    with_known_arguments,
)
from fsdp_flat.runtime.buffer_averages import average_buffers, persistent_buffers
from fsdp_flat.runtime.build import (
    build_per_param,
    check_not_torchs,
    check_outside_units,
    outer_holder_in,
)
from fsdp_flat.runtime.clipping import check_gradients_set, clip_grads, local_norm
from fsdp_flat.runtime.compute_device import (
    current_accelerator,
    default_device,
    devices_of,
    planned_accelerator,
)
from fsdp_flat.runtime.construction import Arguments, construct, resolve_ignored
from fsdp_flat.runtime.full_params import full_params, summon_full_params
from fsdp_flat.runtime.offload_optimizer import offload_optimizer
from fsdp_flat.runtime.optimizer_groups import Settings, differing_settings, group_settings, param_groups_of
from fsdp_flat.runtime.optimizer_steps import stepped_ids, unwrapped_from
from fsdp_flat.runtime.other_forwards import (
    ForwardHooks,
    UnshardHandle,
    participate,
    register_forward_method,
    run_module,
    unshard_for,
)
from fsdp_flat.runtime.sharded_module import GradientReductionHandle, ShardedModule, require_root, share_comm_ctx
from fsdp_flat.runtime.unit_record import FullParams, unit_record
from fsdp_flat.runtime.unit_settings import (
    register_comm_hook,
    replace_collectives,
    set_comm_hook,
    set_divide_factor_of_tree,
    without_reduction,
)
from fsdp_flat.runtime.unwrap import convert_unit, hide_compiled_name, unwrap
