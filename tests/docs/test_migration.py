"""The migration pages: no option of the other library is missing on them."""

import re

from support.paths import REPO

PAGES = REPO / "docs" / "migration"
# The arguments of `fully_shard`, the fields of its policy, and the public methods of `FSDPModule`, in PyTorch 2.14.1.
FSDP2 = """module mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params dp_mesh_dims
    param_dtype reduce_dtype output_dtype cast_forward_inputs
    reshard unshard reset_iter_state set_is_last_backward set_requires_gradient_sync set_requires_all_reduce
    set_reshard_after_forward set_reshard_after_backward set_modules_to_forward_prefetch
    set_modules_to_backward_prefetch set_custom_all_gather set_custom_reduce_scatter set_all_reduce_hook
    set_post_optim_event set_reduce_scatter_divide_factor set_gradient_divide_factor set_force_sum_reduction_for_comms
    set_reduce_scatter_unused_params set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group
    set_unshard_in_backward set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm
    register_fsdp_forward_method share_comm_ctx"""


def test_every_option_of_fsdp2_is_named_in_the_first_column():
    rows = re.findall(r"^\| (.*?) \|", (PAGES / "from_fsdp2.md").read_text(), re.MULTILINE)
    named = {word for row in rows for code in re.findall(r"`([^`]*)`", row) for word in re.findall(r"\w+", code)}
    assert not set(FSDP2.split()) - named
