"""What a device allows: the policy's model, its TOML, its explanation and its differences."""

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
    DeviceBudget,
    FieldBudget,
    Policy,
    Renyi,
    ReportKind,
    Table,
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
    "DeviceBudget",
    "FieldBudget",
    "Policy",
    "Renyi",
    "ReportKind",
    "Table",
]
