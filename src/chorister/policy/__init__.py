"""What a device allows: the policy's model, its explanation, its costs and its differences."""

from __future__ import annotations

from chorister.policy.model import (
    OTHER,
    Aggregator,
    AggregatorPair,
    Analysis,
    AnalysisBudget,
    Composition,
    Crowd,
    DataField,
    DataTable,
    DeviceBudget,
    FieldBudget,
    Policy,
    Renyi,
    ReportKind,
)

__all__ = [
    "OTHER",
    "Aggregator",
    "AggregatorPair",
    "Analysis",
    "AnalysisBudget",
    "Composition",
    "Crowd",
    "DataField",
    "DataTable",
    "DeviceBudget",
    "FieldBudget",
    "Policy",
    "Renyi",
    "ReportKind",
]
