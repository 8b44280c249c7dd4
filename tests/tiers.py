"""The three tiers: ``make test`` leaves out what is marked slow, ``make test-rest`` runs that but for what is marked
exhaustive, ``make test-exhaustive`` runs the rest. ``make test-all`` runs everything, continuous integration the first two.

Some tests have many cases that cost much and differ little. They are listed here, in one place, with what the default
run keeps of them (``THINNED``) and what the slow one does of the rest (``EXHAUSTIVE``); ``conftest.py`` marks the other
cases. Products of several parameters become coverings there: every value of each parameter still runs. A single test
may say ``@pytest.mark.slow`` itself, and one is slow that took more than a limit of CPU time when ``make costs`` was run
last (``cputime.py``); of what carries the main promise a case stays nevertheless (``CORE``).
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypeVar

from tests.pairwise import covering

Keep = Literal["pairs", "values", "third", "fourth", "first", "none"]
"""Every pair of values of two parameters; every value of each parameter; every so many cases, beginning with the first."""
Row = TypeVar("Row", bound=Sequence[object])

THINNED: dict[str, Keep] = {
    "tests/draft/test_join.py::test_a_joined_row_is_guessed_as_alone": "values",
    "tests/draft/test_waiting.py::test_what_is_told_late_is_guessed_from_as_if_told_at_once": "values",
    "tests/engine/test_equality.py::test_draft_model": "values",
    "tests/engine/test_matrix.py::test_rules_that_read_q_keep_the_joint_law": "values",
    "tests/engine/test_traffic.py::test_random_traffic_gives_every_request_its_solo_tokens": "first",
    "tests/engine/test_shapes.py::test_a_smaller_draft_vocabulary": "third",
    "tests/engine/test_shapes.py::test_company_does_not_change_a_rejected_text": "values",
    "tests/engine/test_shapes.py::test_float32": "third",
    "tests/engine/test_shapes.py::test_the_end_of_the_context": "third",
    "tests/engine/test_shapes.py::test_the_same_text": "values",
    "tests/engine/test_suffix.py::test_greedy_rejection_and_padded_width": "values",
    "tests/engine/test_suffix.py::test_the_text_is_that_of_plain_decoding": "values",
    "tests/engine/test_native_hybrids.py::test_every_drafter_gives_plain_tokens": "values",
    "tests/engine/test_native_hybrids.py::test_prompts_of_every_length_in_one_batch": "first",
    "tests/engine/request/test_vocabulary.py::test_draft_logits_of_another_width": "values",
    "tests/methods/eagle/test_native.py::test_a_whole_chain_is_the_twins": "values",
    "tests/methods/eagle/test_native_trees.py::test_a_tree_of_one_call_is_the_twins": "values",
    "tests/methods/test_damaged.py::test_a_damaged_number_is_one_line_and_no_memory": "third",
    "tests/recipes/test_inflate_heads.py::test_the_same_guesses": "values",
    "tests/server/test_lenient.py::test_unsupported_fields_may_have_the_value_that_changes_nothing": "fourth",
    "tests/server/test_openai_calls.py::test_call": "third",
    "tests/server/test_sglang_calls.py::test_call": "third",
    "tests/server/test_sglang_calls.py::test_completion_stream": "third",
    "tests/server/test_turns.py::test_a_marker_in_a_message_ends_no_turn": "third",
    "tests/server/test_turns.py::test_results_that_answer_no_call_are_refused": "third",
    "tests/certify/test_certify.py::test_every_exact_verifier_passes_on_tables": "third",
    "tests/certify/test_certify.py::test_random_models_pass": "first",
    "tests/certify/test_draws.py::test_honest_drafters_pass": "values",
    "tests/certify/test_endpoint.py::test_a_fault_of_texts_is_found_by_name": "third",
    "tests/learn/test_student.py::test_a_students_q_is_the_serving_drafters": "third",
    "tests/learn/test_student.py::test_learning_a_few_texts_raises_their_score_and_serves": "third",
    "tests/model/llama/test_hybrid_caches.py::test_rows_join_with_terms_that_are_not_committed": "values",
    "tests/model/llama/test_hybrids.py::test_a_line_token_by_token": "values",
    "tests/model/llama/test_hybrids.py::test_bits_do_not_depend_on_threads": "values",
    "tests/model/llama/test_hybrids.py::test_nodes_of_trees_have_the_bits_of_their_own_text": "values",
    "tests/model/llama/test_hybrids.py::test_rounded_weights_are_near": "values",
    "tests/verify/test_exact.py::test_joint_law_and_text_by_exact_enumeration": "pairs",
    "tests/verify/test_matrix.py::test_every_shape": "values",
    "tests/verify/test_matrix.py::test_every_shape_at_v_4": "first",
    "tests/verify/test_statistics.py::test_joint_law_of_three_tokens": "values",
    "tests/verify/test_two_steps.py::test_two_coupled_steps": "first",
}

CORE = (
    "tests/certify/test_draws.py::test_honest_drafters_pass",
    "tests/certify/test_draws.py::test_liars_are_caught",
    "tests/cli/test_early.py::test_a_wrong_option_is_said_before_a_model_that_is_to_be_fetched",
    "tests/cli/test_early.py::test_every_command_looks_for_its_models_first",
    "tests/cli/test_early.py::test_methods_is_one_screen_without_torch",
    "tests/cli/test_early.py::test_mistakes",
    "tests/cli/test_early.py::test_what_is_typed_is_checked_by_the_option_itself",
    "tests/cli/test_process.py::test_closed_pipe_is_silent",
    "tests/cli/test_process.py::test_full_disk_behind_standard_output_is_one_line",
    "tests/cli/test_process.py::test_help_and_usage_errors_import_neither_torch_nor_transformers",
    "tests/cli/test_process.py::test_standard_streams_that_are_closed",
    "tests/core/test_noise.py::test_coupled_noise_depends_on_seed_position_and_token_alone",
    "tests/device/test_blocks.py::test_the_tokens_are_the_cpus",
    "tests/device/test_graphs.py::test_graphs_write_the_same_tokens",
    "tests/device/test_host.py::test_the_tokens_are_the_cpus",
    "tests/device/test_limits.py::test_one_read_and_no_upload",
    "tests/device/test_tokens.py::test_the_tokens_are_the_cpus",
    "tests/engine/drafters/test_guarded.py::test_a_service_whose_method_always_fails_loses_no_token",
    "tests/engine/test_cache.py::test_cache_after_side_branches",
    "tests/engine/test_endings.py::test_min_new_tokens_forbids_the_end_at_draft_positions",
    "tests/engine/test_equality.py::test_eos_is_in_play",
    "tests/engine/test_errors.py::test_nan_of_a_draft_costs_only_guesses",
    "tests/engine/test_hybrid.py::test_the_text_is_that_of_plain_decoding",
    "tests/engine/test_loras.py::test_guesses_change_no_token",
    "tests/engine/test_native_hybrids.py::test_every_drafter_gives_plain_tokens",
    "tests/engine/test_rejection.py::test_text_does_not_depend_on_company",
    "tests/engine/test_selfcheck.py::test_a_command_goes_on_without_guesses",
    "tests/engine/test_streams.py::test_a_stream_is_the_completion",
    "tests/engine/test_structured.py::test_plain_texts_are_of_their_formats",
    "tests/engine/test_thinking.py::test_the_same_text_with_and_without_guesses",
    "tests/kernels/test_gpu_draws.py::test_the_walk_is_that_of_the_verifier",
    "tests/kernels/test_gpu_layers.py::test_a_pass_equals_its_torch_twin",
    "tests/learn/test_hybrid.py::test_new_weights_of_the_second_method_change_its_guesses_and_no_text",
    "tests/methods/draft_model/test_crossing.py::test_the_drafts_cache_is_its_text",
    "tests/methods/draft_model/test_crossing.py::test_under_a_rule_that_reads_q_a_row_of_a_batch_has_its_solo_text",
    "tests/methods/draft_model/test_narrow.py::test_under_rejection_the_law_is_the_targets",
    "tests/methods/eagle/test_drafter.py::test_text_is_the_same_with_and_without_the_head",
    "tests/methods/eagle/test_native_trees.py::test_heads_and_types_by_one_call_a_depth",
    "tests/model/hf/test_recurrent_bf16.py::test_as_near_to_float32_as_transformers_itself",
    "tests/mutants/test_mutants.py::test_the_text_of_every_bug_is_there_once",
    "tests/mutants/test_mutants.py::test_the_tests_that_catch_them_exist",
    "tests/server/test_anthropic.py::test_a_message_whole_and_streamed",
    "tests/server/test_loras.py::test_models_at_once_whole_and_streamed",
    "tests/test_floors.py::test_no_two_files_import_each_other",
    "tests/test_prose.py::test_no_mannered_phrase_in_the_source",
    "tests/verify/test_matrix.py::test_every_law_at_every_node_of_small_trees",
    "tests/verify/test_matrix.py::test_every_shape_at_v_4",
)
"""What carries the main promise, and what a change of the command line should meet: of each the default run keeps the
cheapest case, whatever it costs."""


def spared(costs: Mapping[str, float]) -> set[str]:
    """The cheapest case of each test of ``CORE``, of tests by their names."""
    cases: dict[str, list[str]] = defaultdict(list)
    for node in costs:
        cases[node.split("[")[0]].append(node)
    return {min(cases[name], key=lambda node: costs[node]) for name in CORE if name in cases}


SLOW = frozenset({
    "tests/cli/test_train_processes.py::test_two_processes_are_one_with_two_passes_a_step",
    "tests/engine/test_matrix.py::test_draws_without_replacement_at_length",
    "tests/learn/test_service.py::test_the_process_learns_swaps_and_can_be_killed",
    "tests/model/test_tensor_parallel.py::test_a_service_over_both_processes_writes_the_same",
    "tests/model/test_tensor_parallel.py::test_fresh_seeds_are_agreed_on",
    "tests/model/test_tensor_parallel.py::test_logits_over_trees",
    "tests/model/test_tensor_parallel.py::test_memory_is_divided",
    "tests/model/test_tensor_parallel.py::test_tokens_are_those_of_one_process",
    "tests/model/test_tensor_parallel.py::test_unlike_calls_are_refused_in_every_process",
    "tests/model/test_workers.py::test_an_idle_service_holds_no_workers",
    "tests/stress/test_hostile.py::test_a_server_that_keeps_the_contract_passes",
})  # fmt: skip
"""Left out whole: several processes, thousands of texts of a real model, or seconds of waiting."""

EXHAUSTIVE: dict[str, Keep] = {
    "tests/certify/test_endpoint.py::test_every_fault_is_found_by_name_among_all_checks": "first",
    "tests/doctor/test_head.py::test_another_template_is_found": "first",
    "tests/draft/test_join.py::test_a_joined_row_is_guessed_as_alone": "values",
    "tests/engine/test_equality.py::test_draft_model": "values",
    "tests/engine/test_hybrid.py::test_the_text_is_that_of_plain_decoding": "values",
    "tests/engine/test_matrix.py::test_draws_without_replacement_at_length": "first",
    "tests/engine/test_matrix.py::test_legal_ones_run_and_the_others_are_refused[draft_model-whole]": "none",
    "tests/engine/test_matrix.py::test_rules_that_read_q_keep_the_joint_law": "values",
    "tests/engine/test_recurrent.py::test_every_drafter_gives_plain_tokens": "values",
    "tests/engine/test_shapes.py::test_the_same_text": "values",
    "tests/engine/test_suffix.py::test_the_text_is_that_of_plain_decoding": "values",
    "tests/engine/request/test_vocabulary.py::test_draft_logits_of_another_width": "values",
    "tests/learn/test_student.py::test_learning_a_few_texts_raises_their_score_and_serves": "values",
    "tests/methods/draft_model/test_crossing.py::test_every_shape_over_shared_tokens": "values",
    "tests/methods/draft_model/test_crossing.py::test_the_drafts_cache_is_its_text": "values",
    "tests/methods/draft_model/test_crossing.py::test_the_text_is_the_targets_own": "values",
    "tests/model/llama/test_native.py::test_bits_do_not_depend_on_width_tree_batch_slot_span_or_threads": "values",
    "tests/model/test_types.py::test_the_line_is_what_a_run_says": "fourth",
    "tests/planner/test_layered.py::test_a_cheap_second_method_is_used_where_the_light_part_has_nothing": "first",
    "tests/planner/test_layered.py::test_where_neither_pays_both_try_within_their_budgets": "first",
    "tests/server/test_constraint.py::test_forbidden_guesses_are_never_emitted": "values",
    "tests/stress/test_equality.py::test_equality": "values",
    "tests/verify/test_exact.py::test_joint_law_and_text_by_exact_enumeration": "values",
    "tests/verify/test_matrix.py::test_every_shape": "values",
    "tests/verify/test_matrix.py::test_every_shape_at_v_4": "values",
    "tests/verify/test_statistics.py::test_joint_law_of_three_tokens": "values",
}
"""What the slow run keeps of the cases that the default run leaves out, of a test or of one named case."""

LONG = ("tests/mutants/", "tests/stress/", "tests/extend/test_package.py")
LONG_S = 15.0


def long(node: str, seconds: float) -> float:
    """How long a test takes, 0 where that is not long. Files with long tests begin a run, the longest first: one that came
    last would keep one core busy while the others are idle."""
    seconds = max(seconds, LONG_S if node.startswith(LONG) else 0.0)
    return seconds if seconds >= LONG_S else 0.0


def numbered(cases: Sequence[Mapping[str, object]]) -> list[tuple[int, ...]]:
    """Parameters as numbers: equal values of one parameter have one number, values that cannot be hashed are told apart."""
    numbers: dict[str, dict[Hashable, int]] = defaultdict(dict)
    return [
        tuple(
            numbers[name].setdefault(
                (type(value), value if isinstance(value, Hashable) else id(value)), len(numbers[name])
            )
            for name, value in case.items()
        )
        for case in cases
    ]


def kept(rows: Sequence[Row], keep: Keep) -> list[Row]:
    """The cases, by their parameters, that a run keeps."""
    if keep == "pairs":
        return covering(rows, 2)
    if keep == "values":
        return covering(rows, 1)
    if keep == "none":
        return []
    return list(rows[:: {"third": 3, "fourth": 4, "first": len(rows) or 1}[keep]])
