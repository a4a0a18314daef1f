"""A task, as the native module wants it: what every share of every report is bound to.

The VDAF's application context is the version tag and the task id; the associated data of a sealed
share begins with the task id and the whole `TaskConfiguration` (DAP, section "Client Behavior").
Device and aggregators build it here, from the same configuration, so that they can't disagree.
"""

from __future__ import annotations

from chorister._native import Prio3, TaskBinding
from chorister.dap.draft import VERSION_TAG, Role, input_share_info
from chorister.dap.task import TaskConfiguration, task_id
from chorister.dap.vdaf import VDAF, Prio3MultihotCountVec

__all__ = ["native_vdaf", "task_binding"]


def native_vdaf(vdaf: VDAF) -> Prio3:
    """The native Prio3 of a task configuration, with the chunk length that it states."""
    if isinstance(vdaf, Prio3MultihotCountVec):
        return Prio3.multihot_count_vec(
            vdaf.length, vdaf.max_weight, chunk_length=vdaf.chunk_length
        )
    return Prio3.sum_vec(vdaf.length, vdaf.max_measurement, chunk_length=vdaf.chunk_length)


def task_binding(task: TaskConfiguration) -> TaskBinding:
    """What binds reports to the task with this configuration."""
    identifier = task_id(task)
    return TaskBinding(
        native_vdaf(task.vdaf),
        context=VERSION_TAG + identifier,
        aad=identifier + task.encode(),
        leader_info=input_share_info(Role.LEADER),
        helper_info=input_share_info(Role.HELPER),
    )
