"""Every MUST of sections 3, 4 and 5.1 of draft-ietf-ppm-dap-18, and of taskprov, in their order.

A rule is named by its section and a few of its words, and has a case that shows it on the real
applications, or a reason why it does not apply. `test_conformance` compares the list with the text
of the draft where that is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.aggregator import conform_aggregation as job
from tests.aggregator import conform_collection as collection
from tests.aggregator import conform_http as http
from tests.aggregator import conform_taskprov as taskprov
from tests.aggregator import conform_upload as upload
from tests.aggregator import conform_verification as share
from tests.aggregator.apps import Apps

Case = Callable[[Apps], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence with a MUST."""

    section: str
    words: str
    case: Case | None = None
    why_not: str | None = None  # if there is no case

    @property
    def name(self) -> str:
        return f"{self.section}: {self.case.__name__}" if self.case else f"{self.section}: none"


ONE_ROUND = "Prio3 has one round: a job is finished when it is created, nothing is ever continued"
AT_ONCE = "our helper answers every job at once"

HTTP = (
    Rule("3", "value MUST be encoded in its URL-safe", http.identifiers_are_base64url),
    Rule("3", "use of HTTPS is REQUIRED", http.credentials_travel_by_https),
    Rule("3", "certificates MUST be checked", http.certificates_are_checked),
    Rule("3.1", "MUST abort with the error", http.a_failure_comes_with_the_next_look),
    Rule("3.1", "MUST abort with the error", http.a_failure_comes_at_once),
    Rule("3.2", "creation MUST be idempotent", http.creation_is_idempotent),
    Rule("3.5", "authentication is REQUIRED", http.every_interaction_but_upload_is_authenticated),
    Rule("3.6", "status code MUST indicate", http.a_problem_document_has_an_error_s_status),
    Rule("3.6", "MUST NOT use the DAP URN", http.only_registered_errors_are_in_dap_s_namespace),
)

TASKS = (
    Rule("4.1", "MUST NOT re-encode", http.urls_are_never_re_encoded),
    Rule("4.1.2", "MUST specify a `NONCE_SIZE`", why_not="for authors of VDAFs; Prio3 does"),
    Rule("4.1.2", "MUST specify an encoding", why_not="for authors of VDAFs; the draft does"),
    Rule("4.2", "MUST be a globally unique", http.task_ids_are_unique),
    Rule("4.2.2", "MUST NOT participate", http.unknown_task_extensions_are_refused),
    Rule("4.2.2", "MUST be encoded in strictly increasing", http.task_extensions_are_in_order),
    Rule("4.2.3", "MUST be rejected", upload.reports_outside_the_interval_are_rejected),
)

UPLOADS = (
    Rule("4.4.1", "MUST allocate distinct", upload.config_ids_are_distinct),
    Rule("4.4.1", "Client MUST abort", upload.clients_refuse_lists_that_are_none),
    Rule("4.4.2", "Client MUST generate this", upload.report_ids_are_random),
    Rule("4.4.2", "MUST use a scheme", upload.uploads_may_need_a_credential),
    Rule("4.4.2.1", "MUST be independently sampled", upload.sharding_is_random),
    Rule("4.4.2.2", "MUST be idempotent", upload.uploads_are_idempotent),
    Rule("4.4.2.2", "MUST appear in the same order", upload.errors_are_in_the_request_s_order),
    Rule("4.4.2.2", "Leader MUST discard it", upload.a_known_id_is_discarded),
    Rule(
        "4.4.2.2",
        "MUST discard any report pertaining",
        upload.reports_of_a_collected_batch_are_discarded,
    ),
    Rule(
        "4.4.2.2",
        "MUST discard any report whose timestamp",
        upload.reports_outside_the_interval_are_rejected,
    ),
    Rule(
        "4.4.2.2",
        "unrecognized public report extension",
        upload.unknown_report_extensions_are_discarded,
    ),
    Rule(
        "4.4.2.2",
        "MUST contain an array of numbers",
        upload.unsupported_extensions_are_named_by_number,
    ),
    Rule(
        "4.4.2.2",
        "same extension type appears more than once",
        upload.repeated_report_extensions_are_discarded,
    ),
)

AGGREGATION = (
    Rule("4.5.1", "MUST abort with error", job.unknown_job_extensions_are_refused),
    Rule("4.5.1", "MUST be encoded in strictly", job.job_extensions_are_in_order),
    Rule("4.5.3.1", "MUST ensure each report", job.only_what_can_be_committed_is_sent),
    Rule("4.5.3.1", "MUST validate the parameter", job.the_leader_sends_prio3_s_parameter),
    Rule("4.5.3.1", "MUST replay the identical", job.a_retry_is_identical),
    Rule("4.5.3.1", "MUST abandon", job.other_reports_in_an_answer_end_the_exchange),
    Rule("4.5.3.1", "MUST NOT include the report", job.rejected_reports_are_not_sent_again),
    Rule("4.5.3.1", "message type is invalid", job.a_wrong_type_of_answer_ends_the_exchange),
    Rule("4.5.3.2", "MUST include a Location", job.a_job_has_a_location),
    Rule("4.5.3.2", "query parameter `step=0`", why_not=AT_ONCE),
    Rule("4.5.3.2", "MUST include the `step`", job.a_look_at_a_job_names_its_step),
    Rule("4.5.3.2", "`unrecognizedTask`", job.jobs_of_unknown_tasks_are_refused),
    Rule("4.5.3.2", "`invalidMessage`", job.malformed_jobs_are_refused),
    Rule("4.5.3.2", "`unsupportedExtension`", job.unknown_job_extensions_are_refused),
    Rule("4.5.3.2", "strictly increasing order", job.job_extensions_are_in_order),
    Rule("4.5.3.2", "`invalidAggregationParameter`", job.other_parameters_are_refused),
    Rule("4.5.3.2", "`invalidMessage`", job.two_shares_of_one_report_are_refused),
    Rule("4.5.3.2", "order MUST match", job.answers_are_in_the_request_s_order),
    Rule("4.5.3.2", "matches an existing aggregation", job.a_job_that_comes_twice_is_one_job),
    Rule("4.5.3.2", "been continued at least once", why_not=ONE_ROUND),
    Rule("4.5.3.4", "MUST perform the following", share.every_input_share_is_checked),
    Rule("4.5.3.4", "`invalid_message`", share.shares_that_do_not_decode_are_invalid),
    Rule("4.5.3.4", "`task_not_started`", share.reports_before_the_task_are_invalid),
    Rule("4.5.3.4", "`task_expired`", share.reports_after_the_task_are_invalid),
    Rule("4.5.3.4", "`invalid_message`", share.unknown_report_extensions_are_invalid),
    Rule("4.5.3.4", "`invalid_message`", share.repeated_report_extensions_are_invalid),
    Rule("4.5.3.4", "equal to or less than", share.report_extensions_out_of_order_are_invalid),
    Rule(
        "4.5.3.4",
        "`report_dropped`",
        why_not="what a check needs is kept until the task ends; then every request is refused",
    ),
    Rule("4.5.4.1", "`VerifyContinue` elements MUST", why_not=ONE_ROUND),
    Rule("4.5.4.1", "MUST include exactly the same", why_not=ONE_ROUND),
    Rule("4.5.4.1", "MUST abandon", why_not=ONE_ROUND),
    Rule("4.5.4.1", "MUST NOT include the report", why_not=ONE_ROUND),
    Rule("4.5.4.1", "MUST abandon", why_not=ONE_ROUND),
    Rule("4.5.4.2", "MUST include a Location", why_not=ONE_ROUND),
    Rule("4.5.4.2", "MUST include the `step`", why_not=ONE_ROUND),
    Rule("4.5.4.2", "`unrecognizedTask`", share.continuing_an_unknown_task_is_refused),
    Rule("4.5.4.2", "`unrecognizedAggregationJob`", share.continuing_an_unknown_job_is_refused),
    Rule("4.5.4.2", "`invalidMessage`", share.malformed_continuations_are_refused),
    Rule("4.5.4.2", "`invalidMessage`", share.continuing_to_step_0_is_refused),
    Rule("4.5.4.2", "`invalidMessage`", share.continuing_reports_that_do_not_wait_is_refused),
    Rule("4.5.4.2", "MUST verify that the contents", why_not=ONE_ROUND),
    Rule("4.5.4.2", "`stepMismatch`", share.other_steps_are_refused),
    Rule("4.5.4.2", "MUST match the Leader's", why_not=ONE_ROUND),
    Rule("4.5.4.3", "`batch_collected`", job.the_helper_takes_nothing_for_a_collected_batch),
    Rule("4.5.4.3", "`report_replayed`", job.the_helper_takes_no_report_twice),
    Rule("4.5.4.3", "MUST check these conditions", job.the_helper_takes_no_report_twice),
    Rule("4.5.4.3", "Leaders MUST perform", job.the_leader_takes_no_report_twice),
    Rule("4.5.5", "MUST NOT be considered", job.what_was_not_committed_still_counts),
    Rule("4.5.5", "MUST NOT delete", job.a_deleted_job_is_still_no_news),
)

COLLECTION = (
    Rule("4.6.1", "`unrecognizedTask`", collection.collections_of_unknown_tasks_are_refused),
    Rule("4.6.1", "`invalidMessage`", collection.collections_in_another_mode_are_refused),
    Rule("4.6.1", "`invalidMessage`", collection.malformed_collections_are_refused),
    Rule(
        "4.6.1",
        "`invalidAggregationParameter`",
        collection.collections_with_a_parameter_are_refused,
    ),
    Rule("4.6.1", "`batchInvalid`", collection.collections_of_other_intervals_are_refused),
    Rule("4.6.1", "`batchOverlap`", collection.nothing_is_collected_twice),
    Rule(
        "4.6.1",
        "`invalidMessage`",
        why_not="Prio3 has one parameter: another one is refused before it could be compared",
    ),
    Rule("4.6.1", "`unsupportedExtension`", collection.unknown_collection_extensions_are_refused),
    Rule("4.6.1", "processing model", why_not="no collection job extension is defined"),
    Rule("4.6.1", "MUST first complete", collection.pending_jobs_come_first),
    Rule(
        "4.6.1",
        "`invalidBatchSize`",
        why_not="our leader does not give up: it waits for reports until the task ends",
    ),
    Rule("4.6.1", "MUST NOT fulfill", collection.too_few_reports_are_never_released),
    Rule("4.6.1", "error that caused", collection.the_helper_s_refusal_is_the_job_s),
    Rule("4.6.1", "jobs MUST NOT commit", collection.a_collected_batch_takes_no_more),
    Rule("4.6.1", "MUST return the existing", collection.a_collection_that_comes_twice_is_one),
    Rule("4.6.2", "`unsupportedExtension`", collection.both_refuse_unknown_extensions),
    Rule("4.6.2", "MUST be encoded in strictly", collection.the_collector_sends_no_extension),
    Rule("4.6.2", "`invalidExtension`", collection.both_refuse_extensions_out_of_order),
    Rule("4.6.2", "MUST define how", why_not="for authors of extensions"),
    Rule("4.6.3", "MUST NOT delete", collection.a_deleted_collection_is_still_collected),
    Rule("4.6.4", "`unrecognizedTask`", collection.shares_of_unknown_tasks_are_refused),
    Rule("4.6.4", "MUST match the task's", collection.shares_in_another_mode_are_refused),
    Rule("4.6.4", "`invalidMessage`", collection.shares_in_another_mode_are_refused),
    Rule("4.6.4", "is malformed", collection.malformed_share_requests_are_refused),
    Rule("4.6.4", "`batchInvalid`", collection.shares_of_other_intervals_are_refused),
    Rule("4.6.4", "`batchOverlap`", collection.no_share_is_released_twice),
    Rule("4.6.4", "`invalidBatchSize`", collection.the_helper_counts_for_itself),
    Rule("4.6.4", "agg_param` MUST match", collection.shares_with_a_parameter_are_refused),
    Rule("4.6.4", "`invalidMessage`", collection.shares_with_a_parameter_are_refused),
    Rule("4.6.4", "MUST independently", collection.both_refuse_extensions_out_of_order),
    Rule("4.6.4", "`batchMismatch`", collection.other_reports_are_a_mismatch),
    Rule("4.6.4", "MUST NOT commit any more", collection.a_released_share_takes_no_more),
    Rule("4.6.4", "reports MUST be rejected", collection.a_released_share_takes_no_more),
    Rule("4.6.4", "MUST return the existing", collection.a_share_that_is_asked_for_twice_is_one),
    Rule("4.6.5", "MUST NOT delete", collection.a_deleted_share_is_still_released),
    Rule("5.1.1", "MUST be well-formed", collection.intervals_are_well_formed),
)

RULES = (*HTTP, *TASKS, *UPLOADS, *AGGREGATION, *COLLECTION)

TASKPROV = (
    Rule("3.2", "MUST be a Byte Sequence", taskprov.advertisements_are_byte_sequences),
    Rule("3.2", "other types MUST be ignored", taskprov.other_types_are_ignored),
    Rule("3.2", "MUST be a valid", taskprov.advertisements_are_byte_sequences),
    Rule("3.2", "value MUST be ignored", taskprov.values_that_are_no_task_are_ignored),
    Rule("3.2", "parameters that are present", taskprov.parameters_are_ignored),
    Rule("3.3", "SHALL be computed", taskprov.task_ids_are_hashes),
    Rule("3.4", "MUST compute the", taskprov.both_derive_the_verify_key),
    Rule("3.4", "MUST be 32 bytes", taskprov.the_shared_secret_has_32_bytes),
    Rule("3.5", "MUST opt out if", taskprov.ended_and_unknown_kinds_of_tasks_are_left),
    Rule("3.6", "MUST NOT attempt", why_not="for devices: they answer logged recipes only"),
    Rule("3.7.1", "not recognized", why_not="for leaders without taskprov"),
    Rule("3.7.1", "Otherwise, it MUST abort", taskprov.unknown_tasks_are_unrecognized),
    Rule("3.7.1", "does not match", taskprov.the_leader_compares_id_and_advertisement),
    Rule("3.7.1", "invalidTask", taskprov.the_leader_opts_out),
    Rule("3.7.2", "MUST derive", taskprov.both_derive_the_verify_key),
    Rule("3.7.2", "MUST advertise", taskprov.every_request_to_the_helper_advertises),
    Rule("3.7.3", "MUST advertise", taskprov.every_request_to_the_helper_advertises),
    Rule("3.8", "does not recognize", taskprov.the_helper_knows_no_unknown_task),
    Rule("3.8", "unrecognizedTask", taskprov.the_helper_compares_id_and_advertisement),
    Rule("3.8", "invalidTask", taskprov.the_helper_opts_out),
    Rule("3.9", "MUST NOT attempt", taskprov.the_collector_opts_out),
    Rule("3.9", "MUST be derived", taskprov.the_collector_derives_and_advertises),
    Rule("3.9", "MUST advertise", taskprov.the_collector_derives_and_advertises),
    Rule("5", "MUST NOT opt out once", taskprov.who_takes_part_goes_on),
)
